"""When what happened in the hook's last steps: what `advise` and "auto" decide from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from commkern.plan import Plan

_STEPS_KEPT = 8
_KERNELS = ("compress", "reduce", "decompress")


class Bucket(NamedTuple):
    """One bucket of a step; times in nanoseconds, by one clock.

    ``submitted``: backward has filled it; ``started`` and ``ended``: its reduction.
    """

    plan: Plan
    submitted: int
    started: int
    ended: int
    kernel: int
    exchange: int


@dataclass(frozen=True)
class StepTimes:
    """One finished step. ``before`` is the end of the step before it, None for the
    first one; ``extra`` says that it held work that most have not: plans were made, or
    errors sampled; ``committed``, whether all of its results were finite."""

    step: int
    before: int | None
    buckets: tuple[Bucket, ...]
    extra: bool
    committed: bool = True

    @property
    def span(self) -> int:
        """From the first full bucket to the end of the last one's reduction."""
        return self.buckets[-1].ended - self.buckets[0].submitted

    @property
    def rest(self) -> int | None:
        """From the end of the step before to the first full bucket: nothing of ours."""
        return None if self.before is None else self.buckets[0].submitted - self.before


class Timeline:
    """Collects the buckets of a step; ``steps`` are the last finished ones."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.steps: deque[StepTimes] = deque(maxlen=_STEPS_KEPT)
        self._before: int | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the buckets of an unfinished step."""
        self._buckets: list[Bucket] = []
        self._extra = False

    def note_extra(self) -> None:
        """Note work that most steps do not have."""
        self._extra = True

    def add(
        self, plan: Plan, submitted: int, started: int, times: Mapping[str, int]
    ) -> None:
        """Note a bucket whose reduction has just ended; ``times`` as its run gave."""
        ended, exchange = self.clock(), times["exchange"]
        kernel = sum(times[account] for account in _KERNELS)
        self._buckets.append(Bucket(plan, submitted, started, ended, kernel, exchange))

    def close(self, step: int, *, committed: bool = True) -> StepTimes:
        """End a step."""
        buckets = tuple(self._buckets)
        times = StepTimes(step, self._before, buckets, self._extra, committed)
        self.steps.append(times)
        self._before = times.buckets[-1].ended
        self.begin()
        return times
