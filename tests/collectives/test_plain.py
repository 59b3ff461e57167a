"""Elements that travel as they are: long spans from and to where they lie."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.simulation import gradient, same_bits, two_shot

import commkern as ck
from commkern.compose import Settings, compose
from commkern.compressors import compressor
from commkern.layout import Member
from commkern.plan import EXTERNAL
from commkern.testing import Died
from commkern.transports import ProcessGroupTransport

LONG = 400_000  # a share is a piece, at up to four ranks and 16 bits
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def plan_of(rank, world_size, numels, coder="identity", **settings):
    members, offset = [], 0
    for number, numel in enumerate(numels):
        members.append(Member(f"w{number}", numel, offset, compressor(coder)))
        offset += numel
    return compose(
        members,
        "float32",
        rank=rank,
        world_size=world_size,
        settings=Settings(**settings),
    )


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_both_ends_cut_a_message_at_the_same_places(world_size, segments):
    numels = [3_000_000, 10, 0, 2_000_000, 500]
    plans = [
        plan_of(rank, world_size, numels, segments=segments)
        for rank in range(world_size)
    ]
    for plan in plans:
        for number, exchange in enumerate(plan.exchanges):
            for peer, pieces in exchange.sends:
                wanted = plans[peer].exchanges[number].receives
                theirs = next(t.pieces for t in wanted if t.peer == plan.rank)
                sizes = [piece.nbytes for piece in pieces]
                assert sizes == [piece.nbytes for piece in theirs]
                assert [piece.buffer for piece in pieces].count("data") == 2
                in_place = [piece.buffer for piece in theirs].count("data")
                assert in_place == (0 if number < segments else 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_long_parameter_needs_room_for_what_others_send_alone(world_size):
    plan = plan_of(0, world_size, [3_000_000, 500])
    workspace = sum(n for name, n in plan.buffers.items() if name not in EXTERNAL)
    share = plan.buffers["data"] / world_size
    assert workspace < (world_size - 1) * share + 20_000


def test_short_spans_and_codes_are_never_sent_from_the_data_buffer():
    for plan in (
        plan_of(0, 2, [100, 60_000] * 5),
        plan_of(0, 2, [3_000_000], "quantize:bits=8"),
        plan_of(0, 2, [3_000_000], "cast:dtype=bf16"),
    ):
        for exchange in plan.exchanges:
            assert {len(transfer.pieces) for transfer in exchange.sends} == {1}


def reduce_long(rank, world_size, dtype):
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        tensor = gradient(rank, LONG, dtype)
        ck.all_reduce(tensor, op)
        results.append(tensor)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_tensors(ranks, dtype, world_size):
    inputs = [gradient(rank, LONG, dtype) for rank in range(world_size)]
    total = two_shot("identity", inputs)
    mean = two_shot("identity", inputs, average=True)
    for found in ranks.run(world_size, reduce_long, dtype):
        assert same_bits(found[0], total)
        assert same_bits(found[1], mean)


def mean_of_the_largest(rank, world_size):
    largest = torch.finfo(torch.float16).max
    tensors = [torch.full((n,), largest, dtype=torch.float16) for n in (64, LONG)]
    for tensor in tensors:
        ck.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensors


def test_a_mean_of_numbers_in_range_is_in_range(ranks):
    for tensors in ranks.run(3, mean_of_the_largest):
        for tensor in tensors:
            assert torch.all(tensor == torch.finfo(torch.float16).max)


def heard_of(rank, _world_size, value, at):
    """Rank 1's gradient has ``value`` in one element: does this rank's step raise?"""
    model = torch.nn.Linear(1000, LONG // 1000, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ck.register(ddp, "identity", nonfinite="raise")
    weight = torch.ones(LONG)
    weight[at] = value if rank == 1 else 1.0
    own = (weight.view_as(model.weight) * model.weight).sum()
    try:
        (ddp(torch.zeros(1, 1000)).sum() + own).backward()
    except ck.NonFiniteError:
        return True
    return False


@pytest.mark.parametrize("at", [0, LONG - 1])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2.0])
def test_every_rank_hears_of_values_not_finite(ranks, value, at):
    """Also those that received the sum where it stays."""
    assert ranks.run(3, heard_of, value, at) == [not math.isfinite(value)] * 3


class FailingRound:
    """While entered, ``method`` of a round fails on this rank."""

    def __init__(self, method, number):
        self.method, self.number = method, number

    def __enter__(self):
        self.bind = bind = ProcessGroupTransport.bind

        def failing(*args):
            bound = bind(*args)
            call = getattr(bound, self.method)

            def fail_or_call(number):
                if number == self.number:
                    raise ZeroDivisionError(f"in {self.method} of round {number}")
                call(number)

            setattr(bound, self.method, fail_or_call)
            return bound

        ProcessGroupTransport.bind = failing

    def __exit__(self, *error):
        ProcessGroupTransport.bind = self.bind


HUGE = 16_000_000


def fails_and_goes_on(rank, world_size, method, number):
    """Rank 0 fails, and uses its tensor at once for something else."""
    tensor = torch.full((HUGE,), float(rank + 1))
    ck.all_reduce(torch.zeros(8))
    if rank == 0:
        with FailingRound(method, number), pytest.raises(ZeroDivisionError):
            ck.all_reduce(tensor)
        tensor.fill_(-1.0)
        time.sleep(1)
        return bool(torch.all(tensor == -1.0))
    if (method, number) != ("complete", 1):
        with pytest.raises(ck.PeerFailed, match="rank 0"):
            ck.all_reduce(tensor)
        return True
    ck.all_reduce(tensor)
    return bool(torch.all(tensor == 3.0))


@pytest.mark.parametrize(
    ("method", "number"), [("post", 0), ("complete", 0), ("post", 1), ("complete", 1)]
)
def test_after_a_failure_nothing_moves_from_or_to_the_tensor(ranks, method, number):
    started = time.monotonic()
    assert ranks.run(2, fails_and_goes_on, method, number) == [True, True]
    assert time.monotonic() - started < 30  # far below the time-out


def one_of_three_does_not_match(rank, world_size):
    started = time.monotonic()
    coder = "quantize:bits=8" if rank == 2 else "identity"
    with pytest.raises(ck.MismatchError):
        ck.all_reduce(torch.ones(HUGE), compressor=coder)
    return time.monotonic() - started


def test_a_mismatch_is_told_at_once(ranks):
    assert max(ranks.run(3, one_of_three_does_not_match)) < 30


def one_of_three_dies(rank, world_size):
    tensor = torch.ones(HUGE)
    ck.all_reduce(tensor)
    if rank == 1:
        os._exit(3)
    started = time.monotonic()
    with pytest.raises((ck.PeerLost, ck.PeerFailed)):
        ck.all_reduce(tensor)
    return time.monotonic() - started


def test_a_death_is_told_at_once(ranks):
    first, died, last = ranks.run(3, one_of_three_dies, expect_death=[1])
    assert isinstance(died, Died)
    assert max(first, last) < 30


def one_of_three_is_late(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=6))
    store = dist.distributed_c10d._get_default_store()
    ck.all_reduce(torch.zeros(8), group=group)
    started = time.monotonic()
    if rank == 1:
        store.wait(["0 is through", "2 is through"])
    with pytest.raises((ck.PeerLost, ck.PeerFailed)):
        ck.all_reduce(torch.ones(HUGE), group=group)
    store.set(f"{rank} is through", "")
    return time.monotonic() - started


def test_a_rank_that_is_late_costs_one_time_out(ranks):
    first, _, last = ranks.run(3, one_of_three_is_late)
    assert 5.5 < max(first, last) < 11.5
