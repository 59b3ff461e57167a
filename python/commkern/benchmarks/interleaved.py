"""Several ways to do the same thing, timed in turn by the ranks of fresh processes.

Times of collectives differ more between processes than within one, so that two ways are
compared inside the same processes, round by round, and every figure is the median over
several fresh sets of processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from commkern.rank_pool import RankPool

FRESH_PROCESSES = 5
ROUNDS = 7
_UNTIMED_ROUNDS = 2
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Samples:
    """Seconds of every way, one value for each set of processes."""

    seconds: Mapping[str, list[float]]

    def ratio(self, way: str, peer: str) -> float:
        """Median over the sets of processes of the ratio inside one."""
        pairs = zip(self.seconds[way], self.seconds[peer], strict=True)
        return median(ours / theirs for ours, theirs in pairs)


def time_in_turn(
    ways: Mapping[str, Callable[[], Any]], repeats: int = 1
) -> dict[str, float]:
    """In every rank: each way's median over the rounds of its slowest rank's time.

    A way's turn is ``repeats`` calls, of which the time of one is told. Each round
    begins with the next way: what ran before matters.
    """
    times = torch.zeros(_UNTIMED_ROUNDS + ROUNDS, len(ways), dtype=torch.float64)
    turns = deque(enumerate(ways.values()))
    for row in times:
        turns.rotate(-1)
        for column, run in turns:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                run()
            row[column] = (time.perf_counter() - begin) / repeats
    dist.all_reduce(times, dist.ReduceOp.MAX)
    medians = times[_UNTIMED_ROUNDS:].median(dim=0).values.tolist()
    return dict(zip(ways, medians, strict=True))


def sample(
    world_size: int, in_rank: Callable[..., dict[str, float]], *args: Any
) -> Samples:
    """Call ``in_rank(rank, world_size, *args)`` in several fresh sets of processes."""
    runs = []
    for _ in range(FRESH_PROCESSES):
        with RankPool() as pool:
            runs.append(pool.run(world_size, in_rank, *args, timeout_s=_TIMEOUT_S)[0])
    return Samples({way: [run[way] for run in runs] for way in runs[0]})


class Clock:
    """A timer for pytest-benchmark that shows times measured elsewhere."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e-9  # pytest-benchmark waits for its timer to move
        return self._now

    def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        self._now += seconds


CLOCK = Clock()


def record(benchmark: Any, seconds: list[float], **extra_info: Any) -> None:
    """Enter times as the rounds of a benchmark that uses `CLOCK` as its timer."""
    left = iter(seconds)
    benchmark.extra_info.update(extra_info)
    benchmark.pedantic(
        lambda: CLOCK.advance(next(left)), rounds=len(seconds), iterations=1
    )
