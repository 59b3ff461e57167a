"""When what happened in the hook's last steps: what `advise` and "auto" decide from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from commkern.plan import Plan

_STEPS_KEPT = 8


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
    first one; ``composed`` says that plans had to be made, which takes time once."""

    step: int
    before: int | None
    buckets: tuple[Bucket, ...]
    composed: bool

    @property
    def span(self) -> int:
        """From the first full bucket to the end of the last one's reduction."""
        return self.buckets[-1].ended - self.buckets[0].submitted

    @property
    def rest(self) -> int | None:
        """From the end of the step before to the first full bucket: nothing of ours."""
        return None if self.before is None else self.buckets[0].submitted - self.before

    @property
    def exposed(self) -> int:
        """From the last full bucket, when backward has ended, to the end."""
        return self.buckets[-1].ended - self.buckets[-1].submitted


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
        self._composed = False

    def compose(self) -> None:
        """Note that a plan had to be made."""
        self._composed = True

    def add(
        self, plan: Plan, submitted: int, started: int, kernel: int, exchange: int
    ) -> None:
        """Note a bucket whose reduction has just ended."""
        ended = self.clock()
        self._buckets.append(Bucket(plan, submitted, started, ended, kernel, exchange))

    def close(self, step: int) -> StepTimes:
        """End a step."""
        times = StepTimes(step, self._before, tuple(self._buckets), self._composed)
        self.steps.append(times)
        self._before = times.buckets[-1].ended
        self.begin()
        return times
