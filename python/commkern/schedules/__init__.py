"""Collectives as data: pure functions from (world_size, rank) to rounds."""

from __future__ import annotations

from collections.abc import Callable

from commkern.schedules.base import Round, Transfer
from commkern.schedules.two_shot import two_shot

Schedule = Callable[[int, int], tuple[Round, ...]]

# Which algorithms a compressor of each aggregation may run, the first being "auto".
ALGORITHMS: dict[str, dict[str, Schedule]] = {
    "hop": {"two_shot": two_shot},
    "linear": {"two_shot": two_shot},
    "gathered": {},
}

__all__ = ["ALGORITHMS", "Round", "Schedule", "Transfer", "resolve", "two_shot"]


def resolve(algorithm: str, aggregation: str) -> tuple[str, Schedule]:
    """The schedule for an algorithm's name; ValueError lists what the trait allows,
    TypeError for anything but a string."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a string, got {algorithm!r}")
    allowed = ALGORITHMS[aggregation]
    name = next(iter(allowed), algorithm) if algorithm == "auto" else algorithm
    if name not in allowed:
        raise ValueError(
            f"algorithm {algorithm!r} is not available for {aggregation} compressors; "
            f"available: {', '.join(['auto', *allowed])}"
        )
    return name, allowed[name]
