"""Feedback by its string form, and what a variant adds to a reduction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from commkern.compressors.base import KernelCall, Operands


@dataclass(frozen=True)
class Feedback:
    """Base of the feedback settings; instances are immutable and compare by value."""

    name: ClassVar[str]
    #: Whether a result is the running sum of all that was decoded, not the last of it.
    accumulates: ClassVar[bool] = False
    #: Whether two versions of the residual are needed.
    needs_rollback: ClassVar[bool] = False

    def settle_calls(self, on: Operands, data: Any) -> list[KernelCall]:
        """What happens to the residual of ``on.spans`` behind all coding of a step.

        ``data`` still holds the gradient.
        """
        return []

    def __str__(self) -> str:
        """The string form; fields that hold their default are left out."""
        fields = ",".join(
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"{self.name}:{fields}" if fields else self.name


_KNOWN: dict[str, type[Feedback]] = {}


def register(cls: type[Feedback]) -> type[Feedback]:
    """Class decorator: make the feedback known under its ``name``."""
    _KNOWN[cls.name] = cls
    return cls


def feedback(spec: str | Feedback | None) -> Feedback | None:
    """Read feedback settings from their string form; None means no feedback.

    The form is ``name`` or ``name:field=number,field=number``, as ``error:decay=0.9``.
    Raises ValueError for an unknown name, field or value and TypeError for another
    type.
    """
    if spec is None or isinstance(spec, Feedback):
        return spec
    if not isinstance(spec, str):
        raise TypeError(
            f"expected feedback settings, their name or None, got {type(spec).__name__}"
        )
    name, _, rest = spec.partition(":")
    if name not in _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise ValueError(f"unknown feedback {spec!r}; known: {known}, or None")
    return _KNOWN[name](**_numbers(rest, spec, _KNOWN[name]))


def _numbers(text: str, spec: str, cls: type[Feedback]) -> dict[str, float]:
    fields = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, float] = {}
    for item in text.split(",") if text else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in fields:
            raise ValueError(
                f"unknown parameter {key!r} in {spec!r}; "
                f"{cls.name} has: {', '.join(fields) or 'no parameters'}"
            )
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(
                f"{key} in {spec!r} must be a number, got {value!r}"
            ) from None
    return values
