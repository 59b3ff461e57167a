"""A rank on which a call fails outside of its run tells the others."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch

import commkern as ck
from commkern import backend
from commkern.groups import GroupWorker, worker
from commkern.local_transport import LocalGroup
from commkern.residuals import ResidualStore
from commkern.testing import spawn_threads

LIMITS = {"group_timeout_s": 60, "timeout_s": 50}
SOON_S = 20.0


class Broken(Exception):  # noqa: N818
    """Nothing that the code expects."""


def broken(*args, **kwargs):
    raise Broken("on purpose")


def without_memory(store, sizes, extend=ResidualStore.extend):
    if sizes:
        raise Broken("on purpose")
    extend(store, sizes)


def reduce(way, group=None):
    if way == "async":
        ck.all_reduce(torch.ones(3000), group=group, async_op=True).wait()
    elif way == "state":
        ck.all_reduce(torch.ones(3000), group=group, state=ck.ReduceState())
    else:
        ck.all_reduce(torch.ones(3000), group=group)


def outcome(way, group=None):
    began = time.monotonic()
    try:
        reduce(way, group)
        end = None
    except (Broken, ck.PeerFailed) as error:
        end = type(error).__name__, getattr(error, "rank", None), str(error)
    assert time.monotonic() - began < SOON_S
    return end


PLACES = {
    "plan": (GroupWorker, "plan", broken),
    "memory": (ResidualStore, "extend", without_memory),
    "commit": (ResidualStore, "commit", broken),
}


def fails(rank, world_size, way, at, calls, failing):
    for _ in range(calls):
        reduce(way)
    if rank not in failing:
        return [outcome(way) for _ in range(3)]
    with mock.patch.object(*PLACES[at]):
        ends = [outcome(way)]
    return ends + [outcome(way) for _ in range(2)]


OWN = ("Broken", None, "on purpose")


def told(step, rank=1):
    return (
        "PeerFailed",
        rank,
        f"rank {rank} gave up in step {step}: an error on rank {rank}",
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize(
    ("way", "at"), [("sync", "plan"), ("async", "plan"), ("state", "memory")]
)
def test_before_its_run(ranks, world_size, way, at, calls):
    step = 0 if way == "state" else calls
    results = ranks.run(world_size, fails, way, at, calls, (1,), **LIMITS)
    for rank, ends in enumerate(results):
        assert ends == [OWN if rank == 1 else told(step)] * 3


@pytest.mark.parametrize("calls", [0, 2])
def test_behind_its_run(ranks, calls):
    """The others have their results, and are told in the next call."""
    first, second = ranks.run(2, fails, "state", "commit", calls, (1,), **LIMITS)
    assert second == [OWN] * 3
    assert first == [None, told(0), told(0)]


@pytest.mark.parametrize("calls", [0, 2])
def test_where_all_ranks_fail_alike(ranks, calls):
    results = ranks.run(3, fails, "sync", "plan", calls, (0, 1, 2), **LIMITS)
    assert results == [[OWN] * 3] * 3


@pytest.mark.parametrize("kind", ["compiled", "local"])
@pytest.mark.parametrize("calls", [0, 1])
def test_ranks_that_are_threads(kind, calls):
    group = LocalGroup(3) if kind == "local" else backend.core().ThreadGroup(3)
    ends = [group.endpoint(rank) for rank in range(3)]
    reached = threading.Barrier(3)  # who has not ended a call would be told in that

    def one(rank):
        for _ in range(calls):
            reduce("sync", ends[rank])
        reached.wait(30)
        if rank == 1:
            worker(ends[rank]).plan = broken
        return [outcome("sync", ends[rank]) for _ in range(2)]

    results = spawn_threads(3, one)
    assert results[1] == [OWN] * 2
    text = f"rank 1 failed in step {calls}: "
    for kind_, blamed, said in results[0] + results[2]:
        assert (kind_, blamed) == ("PeerFailed", 1)
        assert said.startswith(text)
        assert "on purpose" in said
