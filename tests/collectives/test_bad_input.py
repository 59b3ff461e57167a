"""Bad arguments, ranks that disagree, ranks that die: an exception on every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import commkern as ck
from commkern.testing import Died


def argument_errors(rank, world_size):
    cases = {
        "op": lambda: ck.all_reduce(torch.ones(3), dist.ReduceOp.MAX),
        "dtype": lambda: ck.all_reduce(torch.ones(3, dtype=torch.int32)),
        "type": lambda: ck.all_reduce([1.0]),
        "compressor": lambda: ck.all_reduce(torch.ones(3), compressor="nope"),
        "algorithm": lambda: ck.all_reduce(torch.ones(3), algorithm="ring9"),
        "seed": lambda: ck.all_reduce(torch.ones(3), seed=-1),
        "device": lambda: ck.all_reduce(torch.ones(3, device="meta")),
        "sparse": lambda: ck.all_reduce(torch.ones(3).to_sparse()),
        "expanded": lambda: ck.all_reduce(torch.ones(1).expand(300)),
        "name": lambda: ck.all_reduce(torch.ones(3), name=5),
        "text": lambda: ck.all_reduce(torch.ones(3), name="\ud800"),
        "state": lambda: ck.all_reduce(torch.ones(3), state="error"),
        "group": lambda: ck.all_reduce(torch.ones(3), group="world"),
    }
    if rank != 0:  # what one rank is refused must not put it out of step
        cases = {"op": cases["op"]}
    texts = {}
    for name, case in cases.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            case()
        texts[name] = str(caught.value)
    state = ck.ReduceState()
    ck.all_reduce(torch.ones(3), state=state, name="w")
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        ck.all_reduce(torch.ones(4), state=state, name="w")
    good = torch.ones(3)
    ck.all_reduce(good)
    assert good[0] == world_size
    return texts


def test_bad_arguments_are_refused_and_nothing_is_lost(ranks):
    texts = ranks.run(2, argument_errors)[0]
    assert "MAX" in texts["op"]
    assert "torch.int32" in texts["dtype"]
    assert "float32" in texts["dtype"]
    assert "list" in texts["type"]
    assert "quantize" in texts["compressor"]
    assert "two_shot" in texts["algorithm"]
    assert "-1" in texts["seed"]
    assert "meta" in texts["device"]
    assert "(300,)" in texts["expanded"]
    assert "5" in texts["name"]
    assert "ReduceState" in texts["state"]
    assert "str" in texts["group"]


def without_names(rank, world_size):
    """Calls without a name are one tensor to a state."""
    state, spec = ck.ReduceState(), "quantize:bits=2"
    for value in (0.3, 0.4):
        tensor = torch.linspace(-1, value, 300)
        ck.all_reduce(tensor, compressor=spec, state=state)
    with pytest.raises(ValueError, match=r"without a name had shape .* of its own"):
        ck.all_reduce(torch.ones(4), compressor=spec, state=state)
    tensor = torch.linspace(-1, 0.3, 300)
    ck.all_reduce(tensor, compressor=spec, state=state, name="other")
    return state.residual(None), state.residual("other")


def test_a_state_serves_one_tensor_without_a_name(ranks):
    for unnamed, named in ranks.run(2, without_names):
        assert unnamed.any()
        assert named.any()
        assert not torch.equal(unnamed, named)


def interrupted_on_the_way(rank, world_size):
    """An interrupt before a call's own work leaves the group usable."""
    from commkern import groups

    runs = groups.worker()
    with pytest.raises(KeyboardInterrupt):
        runs.call(interrupt)
    ck.all_reduce(torch.ones(3))
    ck.all_reduce(torch.ones(3), async_op=True).wait()
    return True


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_does_not_lock_the_group(ranks):
    assert all(ranks.run(2, interrupted_on_the_way))


def test_without_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        ck.all_reduce(torch.ones(3))


def disagree(rank, world_size, field):
    numel, dtype, spec, seed, name = 1000, torch.float32, "quantize:bits=8", 0, "w"
    if rank == world_size - 1:
        numel = 1001 if field == "shapes" else numel
        dtype = torch.float64 if field == "dtypes" else dtype
        spec = "quantize:bits=4" if field == "compressor" else spec
        seed = 1 if field == "settings" else seed
        name = "v" if field == "parameter names" else name
    tensor = torch.ones(numel, dtype=dtype)
    started = time.monotonic()
    with pytest.raises(ck.MismatchError) as caught:
        ck.all_reduce(tensor, compressor=spec, seed=seed, name=name)
    error = caught.value
    assert time.monotonic() - started < 20  # far below the time-out
    # The group is spent: messages of the failed call may still be on their way.
    with pytest.raises(ck.MismatchError):
        ck.all_reduce(tensor, compressor=spec, seed=seed, name=name)
    return error.rank, str(error)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("compressor", ("bits=8", "bits=4")),
        ("shapes", ("1000", "1001")),
        ("dtypes", ("float32", "float64")),
        ("settings", ("seed=0", "seed=1")),
        ("parameter names", ("w", "v")),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mismatch_is_named_on_every_rank(ranks, world_size, field, values):
    results = ranks.run(world_size, disagree, field)
    for rank, (blamed, text) in enumerate(results):
        assert f"differs in {field}" in text
        assert all(value in text for value in values)
        last = world_size - 1
        assert blamed == last if rank != last else blamed != last


def die_in_the_middle(rank, world_size):
    ck.all_reduce(torch.ones(1000))
    if rank == 1:
        os._exit(3)
    started = time.monotonic()
    with pytest.raises(ck.PeerLost) as caught:
        ck.all_reduce(torch.ones(100_000), compressor="quantize:bits=8")
    assert time.monotonic() - started < 20  # far below the time-out
    return caught.value.rank, str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_dead_rank_is_peer_lost(ranks, world_size):
    results = ranks.run(
        world_size, die_in_the_middle, group_timeout_s=50, expect_death=(1,)
    )
    assert isinstance(results[1], Died)
    for rank in set(range(world_size)) - {1}:
        blamed, text = results[rank]
        assert blamed == 1
        assert "rank 1" in text


def never_comes(rank, world_size):
    if rank == 1:
        return None
    with pytest.raises(ck.PeerLost) as caught:
        ck.all_reduce(torch.ones(1000))
    return str(caught.value)


def test_a_silent_rank_is_peer_lost_after_the_time_out(ranks):
    text = ranks.run(2, never_comes, group_timeout_s=5)[0]
    assert "rank 1" in text


def fails_inside(rank, world_size):
    from commkern import groups

    runs = groups.worker()
    if rank == 1:
        runs.transport.bind = broken_bind(runs.transport.bind)
    with pytest.raises((ck.PeerFailed, ZeroDivisionError)) as caught:
        ck.all_reduce(torch.ones(1000), compressor="quantize:bits=8")
    return type(caught.value).__name__


def broken_bind(bind):
    def bound(*args):
        transport = bind(*args)
        post = transport.post

        def failing(number):
            if number == 1:
                raise ZeroDivisionError("on purpose")
            post(number)

        transport.post = failing
        return transport

    return bound


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_fails_in_the_second_round_tells_the_others(ranks, world_size):
    names = ranks.run(world_size, fails_inside, group_timeout_s=20)
    expected = ["PeerFailed"] * world_size
    expected[1] = "ZeroDivisionError"
    assert names == expected
