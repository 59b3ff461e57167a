"""With which bucket a step begins, and with which it ends."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class StepBounds:
    """Follows the buckets as DDP hands them over. It reduces those of ``parameters``
    that require a gradient, which need not be the same for the next DDP module.

    DDP numbers them. In the first step of a static graph, however, which it reduces
    behind the backward pass, all have number 0, and of several none is the last.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
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
        last = bucket.is_last() or (numbered_first and not first and self._whole())
        if last:
            self._seen.clear()
        return first, last

    def _whole(self) -> bool:
        """Whether every parameter was in a bucket of the step that is open."""
        known = (reference() for reference in self._parameters)
        return all(
            id(p) in self._seen for p in known if p is not None and p.requires_grad
        )
