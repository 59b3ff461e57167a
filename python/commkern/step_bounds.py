"""With which bucket a step begins, and with which it ends."""

from __future__ import annotations

from collections.abc import Collection

import torch


class StepBounds:
    """Follows the buckets as DDP hands them over; ``names`` are all parameters that it
    reduces.

    DDP numbers them. In the first step of a static graph, however, which it reduces
    behind the backward pass, all have number 0, and of several none is the last.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._seen: set[str] = set()  # in the step that is open
        self._pass = -1  # the backward pass of that step

    def place(
        self, names: Collection[str], number: int, last: bool
    ) -> tuple[bool, bool]:
        """Whether the bucket of these parameters is the first of a step, and whether it
        is the last."""
        current = torch._C._current_graph_task_id()  # -1: outside of any
        open_here = current != -1 and current == self._pass and bool(self._seen)
        first = number == 0 and not (open_here and self._seen.isdisjoint(names))
        if first:
            self._seen.clear()
        self._seen.update(names)
        self._pass = current
        ends = last or (number == 0 and not first and self._seen >= self._names)
        if ends:
            self._seen.clear()
        return first, ends
