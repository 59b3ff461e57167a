"""Compressors by name, and their string form both ways."""

from __future__ import annotations

import dataclasses
import typing
from typing import TypeVar

from commkern.compressors.base import Compressor

# Strings come with payloads too, so their nesting is bounded.
MAX_NESTING = 8

_REGISTRY: dict[str, type[Compressor]] = {}
_HINTS: dict[type[Compressor], dict[str, object]] = {}
C = TypeVar("C", bound=type[Compressor])


def register(cls: C) -> C:
    """Class decorator: make the compressor known under its ``name``."""
    if cls.name in _REGISTRY:
        raise ValueError(f"compressor {cls.name!r} is registered already")
    _REGISTRY[cls.name] = cls
    return cls


def compressors() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_REGISTRY)


def compressor_class(name: str) -> type[Compressor]:
    """The class behind a name; ValueError lists what exists."""
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ValueError(
            f"unknown compressor {name!r}; known: {', '.join(compressors())}"
        ) from None


def compressor(spec: str | Compressor) -> Compressor:
    """Read a compressor from its string form; objects are returned as they are.

    The form is ``name`` or ``name:field=value,field=value``; a nested compressor stands
    in parentheses: ``topk:density=0.01,values=(quantize:bits=4)``.

    Raises ValueError for an unknown name, field or value (the text lists what exists)
    and TypeError for anything but a string or a compressor.
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise TypeError(
            f"expected a compressor or its string form, got {type(spec).__name__}"
        )
    name, _, rest = spec.strip().partition(":")
    cls = compressor_class(name.strip())
    hints = _type_hints(cls)
    fields = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, object] = {}
    for item in _split(rest, spec):
        key, equals, text = (part.strip() for part in item.partition("="))
        if key not in fields:
            raise ValueError(
                f"unknown parameter {key!r} in {spec!r}; "
                f"{cls.name} has: {', '.join(fields) or 'no parameters'}"
            )
        if not equals or not text:
            raise ValueError(f"parameter {key!r} in {spec!r} has no value")
        if key in values:
            raise ValueError(f"parameter {key!r} stands twice in {spec!r}")
        values[key] = _value(text, hints[key], key, spec)
    return cls(**values)


def _type_hints(cls: type[Compressor]) -> dict[str, object]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _split(text: str, spec: str) -> list[str]:
    """Split at commas outside parentheses."""
    items, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth < 0 or depth > MAX_NESTING:
            break
        if char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    if depth > MAX_NESTING:
        raise ValueError(f"more than {MAX_NESTING} compressors nested in {spec!r}")
    if depth != 0:
        raise ValueError(f"unbalanced parentheses in {spec!r}")
    return [*items, text[start:]] if text.strip() else []


def _value(text: str, hint: object, key: str, spec: str) -> object:
    options = typing.get_args(hint) or (hint,)
    if type(None) in options and text == "None":
        return None
    nested = text.startswith("(") and text.endswith(")")
    if Compressor in options:
        return compressor(text[1:-1] if nested else text)
    if nested:
        raise ValueError(f"{key} in {spec!r} takes no compressor, got {text!r}")
    if bool in options:
        if text in {"True", "False"}:
            return text == "True"
        raise ValueError(f"{key} in {spec!r} must be True or False, got {text!r}")
    for number in (int, float):
        if number in options:
            try:
                return number(text)
            except ValueError:
                continue
    if int in options or float in options:
        raise ValueError(f"{key} in {spec!r} must be a number, got {text!r}")
    return text
