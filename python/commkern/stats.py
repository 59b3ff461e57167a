"""Figures of the hook's steps."""

from __future__ import annotations

from typing import Any

from commkern.groups import Outcome
from commkern.plan import Plan


class StepStats:
    """Sums the buckets of a step; `last` is the last closed step."""

    def __init__(self) -> None:
        self._open = _zero()
        self._last = _zero() | {"step": -1, "committed": True}

    def add(self, plan: Plan, outcome: Outcome, hook_ns: int) -> None:
        """Count one bucket."""
        counted = {
            "bytes_sent": outcome.bytes_sent,
            "bytes_dense": plan.bytes_dense,
            "kernel_ms": outcome.kernel_ns / 1e6,
            "exchange_ms": outcome.exchange_ns / 1e6,
            "hook_ms": hook_ns / 1e6,
        }
        self._open = {key: self._open[key] + value for key, value in counted.items()}

    def close(self, step: int, *, committed: bool) -> None:
        """End a step."""
        self._last = self._open | {"step": step, "committed": committed}
        self.drop()

    def drop(self) -> None:
        """Forget the buckets of a step that did not end."""
        self._open = _zero()

    def last(self) -> dict[str, Any]:
        """The last closed step, with its compression factor."""
        sent, dense = self._last["bytes_sent"], self._last["bytes_dense"]
        return self._last | {"compression_factor": dense / sent if sent else 1.0}


def _zero() -> dict[str, Any]:
    keys = ("bytes_sent", "bytes_dense", "kernel_ms", "exchange_ms", "hook_ms")
    return dict.fromkeys(keys, 0)
