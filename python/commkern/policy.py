"""Which compressor a parameter has in a step: decided alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch

from commkern.auto import AutoChoice
from commkern.compressors import Compressor, Identity

Exempt = Callable[[str, torch.Tensor], bool]

_IDENTITY = Identity()


def small_or_vector(name: str, parameter: torch.Tensor) -> bool:
    """The default exemption: one-dimensional parameters and those below 1024 elements.

    Biases and norms matter more than their size, and gain nothing.
    """
    return parameter.dim() <= 1 or parameter.numel() < 1024


class Policy:
    """The compressors of a module's parameters, as a function of name and step."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        compressor: Compressor | AutoChoice,
        *,
        exempt: Exempt | None,
        start_step: int,
    ) -> None:
        _check_exempt(exempt)
        _check_start_step(start_step)
        self._compressor = compressor
        self._start_step = start_step
        self._exempt = {
            name for name, p in parameters.items() if exempt and exempt(name, p)
        }

    def phase(self, step: int) -> Hashable:
        """Equal for two steps in which every parameter has the same compressor."""
        return step < self._start_step or self._base(step)

    def compressor(self, name: str, step: int) -> Compressor:
        """The compressor of a parameter in a step."""
        if step < self._start_step or self.is_exempt(name):
            return _IDENTITY
        return self._base(step)

    def _base(self, step: int) -> Compressor:
        if isinstance(self._compressor, AutoChoice):
            return self._compressor.compressor(step)
        return self._compressor

    def is_exempt(self, name: str) -> bool:
        """Whether a parameter is never compressed."""
        return name in self._exempt


def _check_start_step(start_step: int) -> None:
    if not isinstance(start_step, int) or start_step < 0:
        raise ValueError(f"start_step must be an int, 0 or more, got {start_step!r}")


def _check_exempt(exempt: Exempt | None) -> None:
    if exempt is not None and not callable(exempt):
        raise TypeError(f"exempt must be callable or None, got {exempt!r}")
