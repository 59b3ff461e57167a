"""What compressing costs in accuracy, looked at in some steps only."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from commkern.compressors import Compressor, Identity
from commkern.inputs import checked_int
from commkern.plan import Plan
from commkern.residuals import ResidualStore


class Sampler:
    """Measures this rank's own contributions in every ``every``-th step (0: never)."""

    def __init__(self, every: int) -> None:
        self._every = checked_int("sample_every", every, 0)
        self._open: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._last: dict[str, Any] | None = None

    def due(self, step: int) -> bool:
        """Whether this step is looked at."""
        return self._every > 0 and step % self._every == 0

    def take(
        self,
        plan: Plan,
        data: torch.Tensor,
        residuals: ResidualStore,
        *,
        seed: int,
        step: int,
    ) -> None:
        """Measure a bucket that has not been reduced yet.

        Each parameter as if it was sent whole and alone, its residual added; coders
        that round at random draw as rank 0.
        """
        for member in plan.members:
            if isinstance(member.compressor, Identity):
                continue
            gradient = data[member.offset : member.offset + member.numel]
            value = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if member.residual is not None:
                residual = residuals[member.name]
                self._open["residual_norm"][member.name] = _norm(residual)
                value = value + residual
            self._open["relative_error"][member.name] = _relative_error(
                member.compressor, value, seed=seed, step=step, name=member.name
            )

    def close(self, step: int) -> None:
        """End a step."""
        if self._open:
            self._last = {"step": step, "relative_error": {}, "residual_norm": {}}
            self._last |= self._open
            self.drop()

    def drop(self) -> None:
        """Forget what was taken in a step that does not end."""
        self._open = defaultdict(dict)

    def last(self) -> dict[str, Any] | None:
        """What was taken in the last step that was looked at; None before it."""
        return None if self._last is None else dict(self._last)


def _relative_error(coder: Compressor, value: torch.Tensor, **drawn: Any) -> float:
    """|C(u) - u| / |u|; 0 for zeros, NaN for what is not finite."""
    error = coder.decompress(coder.compress(value, **drawn)).sub_(value)
    whole = _norm(value)
    return _norm(error) / whole if whole else 0.0


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
