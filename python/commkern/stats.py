"""Figures of the hook's steps, and their way into TensorBoard."""

from __future__ import annotations

from collections import Counter
from typing import Any

from commkern.groups import Outcome
from commkern.inputs import checked_int
from commkern.plan import Plan

#: Figure of a step -> what the plan's runner calls it.
_ACCOUNTS = {
    "compress_ms": "compress",
    "wait_ms": "exchange",
    "reduce_ms": "reduce",
    "decompress_ms": "decompress",
}
_BYTES = ("bytes_sent", "bytes_dense")
_TIMES = (*_ACCOUNTS, "other_ms", "hook_ms", "exposed_ms", "last_bucket_ms")


class StepStats:
    """Sums the buckets of a step, and the steps. Times are kept in nanoseconds."""

    def __init__(self) -> None:
        self._open = dict.fromkeys((*_BYTES, *_TIMES), 0)
        self._last = dict(self._open)
        self._sum: Counter[str] = Counter(self._open)
        self._verdict: dict[str, Any] = {"step": -1, "committed": True}
        self._steps = {"steps": 0, "skipped": 0}

    def add(self, plan: Plan, outcome: Outcome, hook_ns: int) -> None:
        """Count one bucket."""
        counted, rest = self._open, hook_ns
        counted["bytes_sent"] += outcome.bytes_sent
        counted["bytes_dense"] += plan.bytes_dense
        for figure, account in _ACCOUNTS.items():
            spent = outcome.times[account]
            counted[figure] += spent
            rest -= spent
        counted["other_ms"] += rest
        counted["hook_ms"] += hook_ns
        counted["last_bucket_ms"] = hook_ns

    def close(self, step: int, *, committed: bool, exposed_ns: int) -> None:
        """End a step."""
        self._open["exposed_ms"] = exposed_ns
        self._last = self._open
        self._verdict = {"step": step, "committed": committed}
        self._sum.update(self._last)
        self._steps["steps"] += 1
        self._steps["skipped"] += not committed
        self.drop()

    def bytes(self) -> dict[str, int]:
        """What the last closed step sent."""
        return {key: self._last[key] for key in _BYTES}

    def drop(self) -> None:
        """Forget the buckets of a step that does not end."""
        self._open = dict.fromkeys(self._open, 0)

    def last(self) -> dict[str, Any]:
        """The last closed step, and under ``total`` all of them."""
        total = self._steps | _figures(self._sum)
        return self._verdict | _figures(self._last) | {"total": total}


def _figures(counted: dict[str, int]) -> dict[str, Any]:
    sent, dense = (counted[key] for key in _BYTES)
    figures: dict[str, Any] = {"bytes_sent": sent, "bytes_dense": dense}
    figures["compression_factor"] = dense / sent if sent else 1.0
    return figures | {key: counted[key] / 1e6 for key in _TIMES}


def write_stats(writer: Any, state: Any, step: int | None = None) -> None:
    """Write the figures of a state's last step as scalars ``commkern/<figure>``.

    Parameters
    ----------
    writer : a ``torch.utils.tensorboard.SummaryWriter``, or anything else with
        ``add_scalar(tag, value, step)``
    state : a `CompressionState`
    step : the x coordinate; None: the state's own count of steps

    What was sampled goes to ``commkern/relative_error/<parameter>`` and
    ``commkern/residual_norm/<parameter>``, at the steps in which it was sampled. Writes
    nothing before the first step. Raises TypeError for another ``writer`` or ``state``,
    ValueError for a ``step`` that is no int, 0 or more.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(f"writer must have add_scalar(tag, value, step), got {writer}")
    if not callable(getattr(state, "stats", None)):
        raise TypeError(f"state must be a CompressionState, got {state}")
    if step is not None:
        checked_int("step", step, 0)
    figures = state.stats()
    own_step, sampled = figures.pop("step"), figures.pop("sampled")
    for nested in ("total", "sparse"):
        figures.pop(nested, None)
    if own_step < 0:
        return
    if sampled is not None and sampled.pop("step") == own_step:
        for figure, values in sampled.items():
            figures |= {f"{figure}/{name}": value for name, value in values.items()}
    at = own_step if step is None else step
    for figure, value in figures.items():
        writer.add_scalar(f"commkern/{figure}", float(value), at)
