"""With which bucket a step begins, and with which it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class StepBounds:
    """Follows the buckets as DDP hands them over; ``parameters`` are all that it
    reduces.

    DDP numbers them. In the first step of a static graph, however, which it reduces
    behind the backward pass, all have number 0, and of several none is the last.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._all = frozenset(map(id, parameters))
        self._seen: set[int] = set()  # in the step that is open
        self._pass = -1  # the backward pass of that step

    def place(self, bucket: Any) -> tuple[bool, bool]:
        """Whether a bucket is the first of a step, and whether it is the last."""
        held, numbered_first = set(map(id, bucket.parameters())), bucket.index() == 0
        current = torch._C._current_graph_task_id()  # -1: outside of any
        open_here = current != -1 and current == self._pass and bool(self._seen)
        first = numbered_first and not (open_here and self._seen.isdisjoint(held))
        if first:
            self._seen.clear()
        self._seen |= held
        self._pass = current
        whole = self._seen >= self._all
        last = bucket.is_last() or (numbered_first and not first and whole)
        if last:
            self._seen.clear()
        return first, last
