"""A rank that fails outside of a run, before it or behind it: the others are told at
once, and say which rank and step it was."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from tests.hook.models import digest, make, train

import commkern as ck

MIDDLE = "layers.1.weight"  # in neither the first bucket nor the last of several
LIMITS = {"group_timeout_s": 60, "timeout_s": 50}
SOON_S = 20.0


class Broken(Exception):  # noqa: N818
    """Nothing that the code expects."""


class Trap:
    """Functions that raise once the trap is set, if they are the ones it is set for."""

    def __init__(self, cause):
        self.cause, self.is_set, self.rank = cause, False, -1

    def around(self, cause, function, concerns=lambda *_: True):
        def trapped(*args, **kwargs):
            if self.is_set and cause == self.cause and concerns(*args):
                raise Broken(f"{cause} of rank {self.rank}")
            return function(*args, **kwargs)

        return trapped

    def settings(self):
        """What a state is given that runs code of the user."""
        scaler = type("Scaler", (), {})()
        scaler.get_scale = self.around("loss scale", lambda: 1.0)
        return {
            "schedule": {"bits": self.around("schedule", lambda step: 4)},
            "learning_rate": self.around("learning rate", lambda: 0.1),
            "grad_scaler": scaler,
        }

    def set(self, rank, state):
        """From here on this rank fails."""
        self.is_set, self.rank = True, rank
        reducer = state.reducer
        worker, plans, parts = reducer.worker, reducer.plans, reducer.worker._workspace
        ours = {n for n, name in plans._names.items() if name == MIDDLE}
        plans.sizes = self.around(
            "sizes", plans.sizes, lambda given, _: ours & set(map(id, given))
        )
        worker.plan = self.around(
            "plan", worker.plan, lambda members, *_: MIDDLE in {m.name for m in members}
        )
        parts.views = self.around("workspace", parts.views, in_middle)
        reducer.stats.add = self.around("stats", reducer.stats.add, in_middle)
        reducer.timeline.close = self.around("end of step", reducer.timeline.close)
        bind = worker.transport.bind

        def bound(plan, *args):
            run, last = bind(plan, *args), len(plan.exchanges) - 1
            run.complete = self.around(
                "last round", run.complete, lambda n: n == last and in_middle(plan)
            )
            return run

        worker.transport.bind = bound


def in_middle(plan, *_):
    return MIDDLE in {member.name for member in plan.members}


def passes(ddp, rank, steps):
    """What each of these backward passes ends with; each must end soon."""
    ends = []
    for step in steps:
        began = time.monotonic()
        try:
            train(ddp, rank, range(step, step + 1))
            ends.append(None)
        except (Broken, ck.PeerFailed) as error:
            told = [getattr(error, "rank", None), getattr(error, "step", None)]
            ends.append((type(error).__name__, str(error), *told))
        assert time.monotonic() - began < SOON_S
    return ends


def fails(rank, world_size, cause, step, failing=(1,), **settings):
    trap, ddp = Trap(cause), make()
    state = ck.register(ddp, "quantize:bits=4", **trap.settings(), **settings)
    train(ddp, rank, range(step))
    state.wait()
    if rank in failing:
        trap.set(rank, state)
    return passes(ddp, rank, range(step, step + 3))


def own(cause, rank=1):
    return ("Broken", f"{cause} of rank {rank}", None, None)


def told(step, rank=1):
    text = f"rank {rank} gave up in step {step}: an error on rank {rank}"
    return ("PeerFailed", text, rank, step)


BEFORE = ["schedule", "learning rate", "loss scale", "sizes", "plan", "workspace"]


@pytest.mark.parametrize("step", [0, 1])  # one bucket; several, and with new plans
@pytest.mark.parametrize("cause", BEFORE)
def test_a_failure_before_a_run(ranks, cause, step):
    """The group is spent by it, and DDP is not: later passes raise the same."""
    first, second = ranks.run(2, fails, cause, step, **LIMITS)
    assert second == [own(cause)] * 3
    assert first == [told(step)] * 3


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("cause", ["schedule", "learning rate", "sizes"])
def test_every_other_rank_is_told(ranks, cause, step):
    results = ranks.run(3, fails, cause, step, **LIMITS)
    assert results == [[told(step)] * 3, [own(cause)] * 3, [told(step)] * 3]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("cause", "step", "ends_well"),
    [
        ("stats", 0, 1),  # the only bucket: others see it in the next step
        ("stats", 1, 0),  # some bucket: in the next bucket
        ("end of step", 0, 1),
        ("end of step", 2, 1),
        ("last round", 0, 1),
        ("last round", 2, 0),
    ],
)
def test_a_failure_behind_a_run(ranks, world_size, cause, step, ends_well):
    results = ranks.run(world_size, fails, cause, step, **LIMITS)
    for rank, ends in enumerate(results):
        if rank == 1:
            assert ends == [own(cause)] * 3
        else:
            assert ends == [None] * ends_well + [told(step)] * (3 - ends_well)


@pytest.mark.parametrize("cause", [*BEFORE, "stats", "end of step", "last round"])
@pytest.mark.parametrize("step", [0, 1])
def test_where_all_ranks_fail_alike_each_raises_its_own(ranks, cause, step):
    results = ranks.run(3, fails, cause, step, (0, 1, 2), **LIMITS)
    assert results == [[own(cause, rank)] * 3 for rank in range(3)]


def test_two_of_three_fail(ranks):
    results = ranks.run(3, fails, "schedule", 1, (0, 2), **LIMITS)
    assert results == [
        [own("schedule", 0)] * 3,
        [told(1, 0)] * 3,
        [own("schedule", 2)] * 3,
    ]


@pytest.mark.parametrize(("cause", "late"), [("schedule", 1), ("learning rate", 0)])
def test_with_a_delay_it_is_told_one_step_later(ranks, cause, late):
    """What fails on the thread of backward is raised in the same pass."""
    first, second = ranks.run(2, delayed, cause, **LIMITS)
    assert first == [None, told(3), told(3)]
    assert second == [None] * late + [own(cause)] * (3 - late)


def delayed(rank, world_size, cause):
    return fails(rank, world_size, cause, 3, delayed=True)


def goes_on(rank, world_size):
    trap, ddp = Trap("schedule"), make()
    state = ck.register(ddp, "quantize:bits=4", ledger=True, **trap.settings())
    train(ddp, rank, range(2))
    if rank == 1:
        trap.set(rank, state)
    ends = passes(ddp, rank, [2])
    trap.is_set = False
    assert ends == [own("schedule") if rank == 1 else told(2)]
    state.rejoin(dist.new_group([0, 1]))
    train(ddp, rank, range(2, 5))
    state.check_ledger()
    return state.step, digest(ddp)


def test_training_goes_on_in_a_new_group(ranks):
    first, second = ranks.run(2, goes_on, **LIMITS)
    assert first == second
    assert first[0] == 5


def a_note(rank, world_size):
    trap, ddp = Trap("schedule"), make()
    state = ck.register(ddp, "quantize:bits=4", **trap.settings())
    trap.set(rank, state)
    with pytest.raises(Broken) as caught:
        train(ddp, rank, range(1))
    return getattr(caught.value, "__notes__", None)


def test_the_note_does_without_what_failed(ranks):
    for rank, notes in enumerate(ranks.run(2, a_note, **LIMITS)):
        if notes is not None:  # Python 3.11
            (text,) = notes
            assert f"rank {rank}, step 0, bucket 0: layers.0.weight, " in text
            assert "compressors unknown (Broken('schedule of rank" in text


def mean_fails(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(2))
    if rank == 1:
        trap = Trap("mean")
        trap.is_set = True
        worker = state.reducer.worker
        worker.plan = trap.around("mean", worker.plan)
    began = time.monotonic()
    with pytest.raises((Broken, ck.PeerFailed)) as caught:
        state.full_state_dict()
    assert time.monotonic() - began < SOON_S
    return type(caught.value).__name__, getattr(caught.value, "step", None)


def test_a_failure_while_a_checkpoint_is_made(ranks):
    assert ranks.run(2, mean_fails, **LIMITS) == [("PeerFailed", 2), ("Broken", None)]
