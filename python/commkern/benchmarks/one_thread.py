"""Ways to do a thing on one thread of this process, timed in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from commkern import backend

ROUNDS = 11
_UNTIMED_ROUNDS = 2


def isas() -> list[str]:
    """Of this machine; ``COMMKERN_ISA`` leaves one."""
    core = backend.core()
    if os.environ.get("COMMKERN_ISA"):
        return [core.isa()]
    names: list[str] = core.available_isas()
    return names


@contextmanager
def one_thread(isa: str | None = None) -> Iterator[None]:
    """One thread for torch and for our kernels, which run on ``isa`` (None: as set)."""
    core = backend.core()
    before = core.isa(), core.num_threads(), torch.get_num_threads()
    core.set_isa(isa or before[0])
    core.set_num_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        core.set_isa(before[0])
        core.set_num_threads(before[1])
        torch.set_num_threads(before[2])


def time_against(
    run: Callable[[], Any], other: Callable[[], Any], rounds: int = ROUNDS
) -> tuple[list[float], float]:
    """Seconds of each round, and the median ratio to ``other`` before and after it."""
    others, runs = [_timed(other)], []
    for _ in range(_UNTIMED_ROUNDS + rounds):
        runs.append(_timed(run))
        others.append(_timed(other))
    turns = zip(runs, others[:-1], others[1:], strict=True)
    ratios = [2 * ours / (before + after) for ours, before, after in turns]
    return runs[_UNTIMED_ROUNDS:], median(ratios[_UNTIMED_ROUNDS:])


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
