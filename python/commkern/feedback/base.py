"""Feedback by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Feedback:
    """Base of the feedback settings; instances are immutable and compare by value."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name


_KNOWN: dict[str, type[Feedback]] = {}


def register(cls: type[Feedback]) -> type[Feedback]:
    """Class decorator: make the feedback known under its ``name``."""
    _KNOWN[cls.name] = cls
    return cls


def feedback(spec: str | Feedback | None) -> Feedback | None:
    """Read feedback settings from their name; None means no feedback.

    Raises ValueError for an unknown name and TypeError for another type.
    """
    if spec is None or isinstance(spec, Feedback):
        return spec
    if not isinstance(spec, str):
        raise TypeError(
            f"expected feedback settings, their name or None, got {type(spec).__name__}"
        )
    if spec not in _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise ValueError(f"unknown feedback {spec!r}; known: {known}, or None")
    return _KNOWN[spec]()
