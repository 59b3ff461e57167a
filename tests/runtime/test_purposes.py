"""What the time of a plan's steps is accounted to."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from tests.runtime.plans import buffers_of, gather_plan, results, run
from tests.runtime.test_real_plans import plan_of

from commkern.compressors import compressors
from commkern.compressors.base import KernelCall
from commkern.plan import PURPOSES, Begin, ReadHeader, Slice, WriteHeader


def times_of(way, steps_of, numel=200_000):
    """Both ranks' times of the hand-written plan with its steps changed."""
    endpoints = way.endpoints(2)

    def rank_body(rank):
        plan = gather_plan(rank, 2, numel)
        plan = replace(plan, steps=tuple(steps_of(plan)))
        return run(plan, buffers_of(plan), endpoints[rank])

    return results(2, rank_body)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_steps_count_for_what_has_begun(way, purpose):
    runs = [times_of(way, lambda plan: (Begin(purpose), *plan.steps)) for _ in range(3)]
    for times in itertools.chain(*runs):
        assert times.keys() == {*PURPOSES, "exchange"}
        assert times["exchange"] > 0
        assert times[purpose] > 0
        for other in {*PURPOSES, "exchange"} - {purpose, "exchange", "other"}:
            assert times[other] == 0
    for ours in zip(*runs, strict=True):  # of one rank
        # Up to the first step; in the best run, for what else the machine does.
        assert min(times["other"] / times[purpose] for times in ours) <= 1


def test_a_purpose_lasts_until_the_next_one(way):
    def steps(plan):
        cast, *rest = plan.steps
        return Begin("compress"), cast, *rest[:3], Begin("decompress"), *rest[3:]

    for times in times_of(way, steps):
        assert times["reduce"] == 0
        assert min(times[p] for p in ("compress", "decompress", "exchange")) > 0


def test_a_slow_peer_counts_as_exchange(way):
    endpoints = way.endpoints(2)

    def rank_body(rank):
        plan = gather_plan(rank, 2, 10)
        time.sleep(0.5 * rank)
        return run(plan, buffers_of(plan), endpoints[rank])

    first, _ = results(2, rank_body)
    assert first["exchange"] > 0.05e9
    assert sum(first[purpose] for purpose in PURPOSES) < first["exchange"]


def buffers_in(value):
    """The buffers that a field of a kernel call refers to."""
    if isinstance(value, Slice):
        return {value.buffer}
    if isinstance(value, (list, tuple)):
        return set().union(*map(buffers_in, value))
    return set()


def purpose_of(call):
    """What a kernel is for, read off its operands."""
    if "parts" in call.fields:
        return "reduce"
    used = buffers_in(list(call.fields.values()))
    decoded = "result" in used and "outgoing" not in used
    return "decompress" if decoded else "compress"


@pytest.mark.parametrize("spec", compressors())
def test_composed_plans_say_what_every_kernel_is_for(spec):
    plan = plan_of(spec, 1, 3, 2)
    begun, seen = PURPOSES[0], set()
    for step in plan.steps:
        if isinstance(step, Begin):
            begun = step.purpose
        elif isinstance(step, KernelCall):
            assert begun == purpose_of(step), step
            seen.add(begun)
        elif isinstance(step, WriteHeader):
            assert begun in ("compress", "reduce")
        elif isinstance(step, ReadHeader):
            assert begun in ("reduce", "decompress")
    assert seen == set(PURPOSES) - {"other"}
    assert "\n  compress:\n" in str(plan)
