"""Every compressor in an all-reduce, and what some of them promise of the result."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from tests.laws import EVERY
from tests.simulation import gradient, same_bits, two_shot

import commkern as ck
from commkern.compose import Settings
from commkern.groups import worker
from commkern.layout import Member, effective
from commkern.local_transport import LocalGroup
from commkern.testing import spawn_threads

SIZES = [5, 129, 1000, 4099]
WHOLE_SHARES = [spec for spec in EVERY if ck.compressor(spec).whole_shares]
WITH_FEEDBACK = [spec for spec in EVERY if ck.compressor(spec).supports_feedback]


def reduced(tensors: list[torch.Tensor], **settings) -> list[torch.Tensor]:
    """The result of every rank."""
    group = LocalGroup(len(tensors))

    def one(rank: int) -> torch.Tensor:
        tensor = tensors[rank].clone()
        ck.all_reduce(tensor, group=group.endpoint(rank), **settings)
        return tensor

    return spawn_threads(len(tensors), one)


def used(spec: str, numel: int) -> ck.Compressor:
    """Small tensors travel as they are."""
    return effective(Member("", numel, 0, ck.compressor(spec)), "float32").compressor


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", EVERY)
def test_every_rank_has_the_bits_of_the_simulation(spec: str, world_size: int) -> None:
    for numel in SIZES:
        inputs = [gradient(rank, numel, torch.float32) for rank in range(world_size)]
        expected = two_shot(used(spec, numel), inputs, seed=3)
        for result in reduced(inputs, compressor=spec, seed=3):
            assert same_bits(result, expected), numel


@pytest.mark.parametrize("spec", [*WHOLE_SHARES, "quantize", "rotated", "ternary"])
def test_segments_change_no_bit(spec: str) -> None:
    sizes = {"a": 5000, "b": 700, "c": 130}
    inputs = [gradient(rank, 5830, torch.float32) for rank in range(3)]

    def one(ends, segments: int, rank: int) -> torch.Tensor:
        data, offset, members = inputs[rank].clone(), 0, []
        for name, numel in sizes.items():
            members.append(Member(name, numel, offset, ck.compressor(spec)))
            offset += numel
        runs = worker(ends[rank])
        plan = runs.plan(members, "float32", Settings(segments=segments))
        runs.call(functools.partial(runs.run, plan, data, seed=0, step=0))
        return data

    found = []
    for segments in (1, 2, 5):
        group = LocalGroup(3)
        ends = [group.endpoint(rank) for rank in range(3)]
        found += spawn_threads(3, functools.partial(one, ends, segments))
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize("spec", WITH_FEEDBACK)
def test_the_ledger_of_error_feedback(spec: str) -> None:
    """Sum of results + sum of residuals = sum of inputs, to rounding."""
    group, steps = LocalGroup(3), 4

    def one(rank: int) -> tuple[torch.Tensor, ...]:
        state, end = ck.ReduceState(feedback="error"), group.endpoint(rank)
        total, wanted = (torch.zeros(3000, dtype=torch.float64) for _ in range(2))
        for step in range(steps):
            tensor = gradient(rank, 3000, torch.float32, seed=step)
            wanted += tensor.double()
            ck.all_reduce(tensor, group=end, compressor=spec, state=state, name="w")
            total += tensor.double()
        left = state.residual("w") if spec != "identity" else torch.zeros(3000)
        return total, wanted, left

    results = spawn_threads(3, one)
    wanted = sum(r[1] for r in results)
    left = sum(r[2].double() for r in results)
    assert (results[0][0] + left - wanted).norm() / wanted.norm() < 1e-5


# --- majority vote --------------------------------------------------------------------


def test_a_majority_vote() -> None:
    votes = torch.tensor(
        [[1.0, -2.0, 3.0, -4.0], [5.0, -6.0, -7.0, 8.0], [-9.0, 1.0, -2.0, 0.0]]
    )
    inputs = [row.repeat(300) for row in votes]
    expected = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(300)
    for op, scale in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.0)):
        for result in reduced(inputs, op=op, compressor="sign:scale=none"):
            assert torch.equal(result, scale * expected)


def test_ties_of_a_majority_vote() -> None:
    """A tie is +1; where every vote of a share is tied, it is 0."""
    first = torch.ones(512)
    for second, share in ((-first, 0.0), (torch.zeros(512), 2.0)):
        for result in reduced([first, second], compressor="sign:scale=none"):
            assert torch.equal(result, torch.full((512,), share))
    mixed = -first
    mixed[::200] = 1.0  # in either share
    for result in reduced([first, mixed], compressor="sign:scale=none"):
        assert torch.equal(result, torch.full((512,), 2.0))


def test_a_majority_vote_takes_no_feedback() -> None:
    match = "sign:scale=none.*feedback must be None, got 'error'"
    tensor = torch.ones(1000)
    end = LocalGroup(1).endpoint(0)
    with pytest.raises(ValueError, match=match):
        ck.all_reduce(
            tensor, group=end, compressor="sign:scale=none", state=ck.ReduceState()
        )
    with pytest.raises(ValueError, match=match):
        ck.CompressionState(end, "sign:scale=none", module=torch.nn.Linear(9, 9))
    assert torch.equal(tensor, torch.ones(1000))


def test_a_majority_vote_without_feedback_is_taken() -> None:
    state = ck.ReduceState(feedback=None)
    tensor, end = -torch.ones(1000), LocalGroup(1).endpoint(0)
    settings = {"compressor": "sign:scale=none", "state": state}
    ck.all_reduce(tensor, group=end, **settings)
    assert torch.equal(tensor, -torch.ones(1000))


# --- two bits -------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("threshold", [0.5, 0.1])
def test_an_average_of_two_bits_is_the_threshold_where_all_agree(
    threshold: float, world_size: int
) -> None:
    agreed = torch.tensor([1.0, -1.0, 0.0, 0.04]).repeat(400)
    inputs = [agreed.clone() for _ in range(world_size)]
    inputs[0][::8] = -5.0  # where the others say 1
    spec = f"twobit:threshold={threshold}"
    expected = torch.tensor([threshold, -threshold, 0.0, 0.0]).repeat(400)
    expected[::8] = -threshold if world_size == 1 else 0.0
    average = reduced(inputs, op=dist.ReduceOp.AVG, compressor=spec)
    for result in average:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
