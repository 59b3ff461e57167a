"""Which compressor a parameter has in a step: decided alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from commkern.assignment import assign, check_patterns
from commkern.auto import AutoChoice
from commkern.compressors import Compressor, Identity
from commkern.inputs import checked_int, checked_tensor
from commkern.step_schedule import FieldSchedules

Predicate = Callable[[str, torch.Tensor], bool]

_IDENTITY = Identity()


def small_or_vector(name: str, parameter: torch.Tensor) -> bool:
    """The default exemption: one-dimensional parameters and those below 1024 elements.

    Biases and norms matter more than their size, and gain nothing.
    """
    checked_tensor("parameter", parameter)
    return parameter.dim() <= 1 or parameter.numel() < 1024


@dataclass(frozen=True)
class Exempt:
    """Parameters that travel uncompressed: those to which any of these applies.

    Parameters
    ----------
    min_numel : fewer elements than this
    max_dim : as many dimensions as this, or fewer
    names : patterns of names, as ``"*.embed.*"``
        A name with a capital letter differs from one without.
    predicate : callable ``(name, parameter) -> bool``

    The default is `small_or_vector`. Raises TypeError and ValueError for what makes no
    sense; a pattern that matches nothing is refused where the parameters are known.
    """

    min_numel: int = 1024
    max_dim: int = 1
    names: tuple[str, ...] = ()
    predicate: Predicate | None = None

    def __post_init__(self) -> None:
        for field in ("min_numel", "max_dim"):
            checked_int(field, getattr(self, field), 0)
        listed = isinstance(self.names, (tuple, list))
        if not listed or not all(isinstance(name, str) for name in self.names):
            raise TypeError(f"names must be a list of patterns, got {self.names!r}")
        object.__setattr__(self, "names", tuple(self.names))
        _check_predicate("predicate", self.predicate)

    def __call__(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the parameter is exempt."""
        checked_tensor("parameter", parameter)
        return (
            parameter.dim() <= self.max_dim
            or parameter.numel() < self.min_numel
            or any(fnmatchcase(name, pattern) for pattern in self.names)
            or bool(self.predicate is not None and self.predicate(name, parameter))
        )


class Policy:
    """The compressors of a module's parameters, as a function of name and step.

    ``given`` is the choice of compressors as it was read; parameters that are ``plain``
    are exempt, whatever ``exempt`` says.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        compressor: Any,
        *,
        exempt: Predicate | None,
        start_step: int = 0,
        schedule: Mapping[str, Any] | None = None,
        dense_every: int | None = None,
        plain: Collection[str] = (),
    ) -> None:
        _check_predicate("exempt", exempt)
        checked_int("start_step", start_step, 0)
        if dense_every is not None:
            checked_int("dense_every", dense_every, 1)
        if isinstance(exempt, Exempt):
            check_patterns("exempt", exempt.names, parameters)
        without = {n for n, p in parameters.items() if exempt and exempt(n, p)}
        without.update(plain)
        self._exempt = without
        self._auto = compressor if isinstance(compressor, AutoChoice) else None
        self.given, chosen = self._assign(compressor, parameters, without)
        self._chosen = {n: c for n, c in chosen.items() if c != _IDENTITY}
        self._distinct = tuple(dict.fromkeys(chosen.values()))
        self._start_step = start_step
        self._dense_every = dense_every
        self._schedule = FieldSchedules(schedule)
        self._schedule.check_fields(self._distinct)
        self.known = self._known() if self._auto is None else list(self._auto.coders)

    def _assign(
        self,
        compressor: Any,
        parameters: Mapping[str, torch.Tensor],
        exempt: Collection[str],
    ) -> tuple[Any, dict[str, Compressor]]:
        if self._auto is None:
            return assign(compressor, parameters, exempt)
        _, chosen = assign(self._auto.coders[-1], parameters, exempt)
        return self._auto, chosen

    def _known(self) -> list[Compressor]:
        """Every compressor that is known to come up; raises for what is refused."""
        found = {c: None for one in self._distinct for c in self._schedule.known(one)}
        if isinstance(self.given, Compressor):
            found[self.given] = None
        return list(found)

    def __str__(self) -> str:
        return (
            f"start_step={self._start_step} dense_every={self._dense_every} "
            f"schedule={self._schedule}"
        )

    def phase(self, step: int) -> Hashable:
        """Equal for two steps in which every parameter has the same compressor."""
        if self._stays_dense:
            return "dense"
        if self.is_dense(step):
            return self.has_begun(step)
        if self._auto is not None:
            return (self._auto.phase(step),)  # 1 would be True
        return tuple(self._schedule.at(coder, step) for coder in self._distinct)

    def compressor(self, name: str, step: int) -> Compressor:
        """The compressor of a parameter in a step."""
        coder = self._chosen.get(name)
        if coder is None or self.is_dense(step):
            return _IDENTITY
        if self._auto is not None:
            return self._auto.compressor(step)
        return self._schedule.at(coder, step)

    def has_begun(self, step: int) -> bool:
        """Whether steps are compressed by now."""
        return step >= self._start_step

    def is_dense(self, step: int) -> bool:
        """Whether nothing is compressed in a step."""
        if not self.has_begun(step):
            return True
        every = self._dense_every
        return every is not None and (step - self._start_step + 1) % every == 0

    def flushes(self, step: int, *, warm_up: bool) -> bool:
        """Whether a step without compression goes through feedback in any case, and so
        takes along what was held back.

        Steps before ``start_step`` do with ``warm_up``: nothing is held back by then,
        but some feedback wants to see the gradient.
        """
        if self._stays_dense or not self.is_dense(step):
            return False
        return warm_up or self.has_begun(step)

    @property
    def tries(self) -> bool:
        """Whether compressors are tried: what one holds back, the next one sends."""
        return self._auto is not None and self._auto.choice is None

    @property
    def _stays_dense(self) -> bool:
        """Whether nothing will be compressed any more."""
        return self._auto is not None and self._auto.choice == _IDENTITY

    def is_exempt(self, name: str) -> bool:
        """Whether a parameter is exempt from whatever compressor there is."""
        return name in self._exempt

    def codes(self, name: str) -> bool:
        """Whether a parameter is compressed in any step."""
        return name in self._chosen


def _check_predicate(what: str, predicate: Any) -> None:
    if predicate is not None and not callable(predicate):
        raise TypeError(f"{what} must be callable or None, got {predicate!r}")
