"""For tests of distributed code: ranks as processes, and ranks as threads."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from commkern.rank_pool import Died, RankDied, RankPool, RankTimeout, RankTraceback
from commkern.rank_worker import send_message

__all__ = [
    "Died",
    "RankDied",
    "RankPool",
    "RankTimeout",
    "RankTraceback",
    "send_message",
    "spawn_threads",
]

Result = TypeVar("Result")


def spawn_threads(
    world_size: int, fn: Callable[[int], Result], timeout_s: float = 60.0
) -> list[Result]:
    """Call ``fn(rank)`` in one thread per rank; results in rank order.

    The first exception (in time) is raised as itself, after all threads have ended.
    Threads that are not done after ``timeout_s`` raise RankTimeout with their stacks;
    they are daemons, so that they do not hold up the end of the process.
    """
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [thread for thread in threads if thread.is_alive()]
    if failures:
        raise failures[0]
    if late:
        stacks = "\n".join(_stack(thread) for thread in late)
        names = ", ".join(thread.name for thread in late)
        raise RankTimeout(f"{names} were not done after {timeout_s} s\n{stacks}")
    return [results[rank] for rank in range(world_size)]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}:\n{''.join(traceback.format_stack(frame))}"
