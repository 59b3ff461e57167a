"""Which compressor every parameter of a module has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from commkern.compressors import Compressor
from commkern.compressors import compressor as read_compressor

Spec = str | Compressor
#: One for all, pairs of (pattern, compressor), or a function of name and parameter.
Choice = (
    Spec
    | Mapping[str, Spec]
    | Sequence[tuple[str, Spec]]
    | Callable[[str, torch.Tensor], Spec]
)
_NAMES_SHOWN = 30


@dataclass(frozen=True)
class PerParameter:
    """Several compressors: pairs of a pattern of names and a compressor."""

    rules: tuple[tuple[str, Compressor], ...]

    def __str__(self) -> str:
        return "; ".join(f"{pattern}={coder}" for pattern, coder in self.rules)


def assign(
    choice: Any, parameters: Mapping[str, torch.Tensor], exempt: Collection[str]
) -> tuple[Compressor | PerParameter, dict[str, Compressor]]:
    """Read a choice: what it says, and the compressor of every parameter but the exempt
    ones.

    Raises ValueError for a pattern that matches no parameter and for parameters that no
    pattern matches, TypeError for what is no choice.
    """
    wanted = [name for name in parameters if name not in exempt]
    if isinstance(choice, (str, Compressor)):
        coder = read_compressor(choice)
        return coder, dict.fromkeys(wanted, coder)
    if isinstance(choice, (Mapping, list, tuple)):
        rules = _rules(choice)
        check_patterns("compressor", [pattern for pattern, _ in rules], parameters)
        return PerParameter(rules), _matched(rules, wanted)
    if callable(choice):
        chosen = {name: _called(choice, name, parameters[name]) for name in wanted}
        return PerParameter(tuple(chosen.items())), chosen
    raise TypeError(
        "compressor must be a compressor, its string form, pairs of (pattern, "
        f"compressor) or a callable (name, parameter), got {type(choice).__name__}"
    )


def _rules(choice: Any) -> tuple[tuple[str, Compressor], ...]:
    pairs = choice.items() if isinstance(choice, Mapping) else choice
    if not choice:
        raise ValueError(
            f"compressor: expected pairs of (pattern, compressor), got {choice!r}"
        )
    rules = []
    for pair in pairs:
        named = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not named or not isinstance(pair[0], str):
            raise TypeError(
                f"compressor: expected pairs of (pattern, compressor), got {pair!r}"
            )
        rules.append((pair[0], read_compressor(pair[1])))
    return tuple(rules)


def _matched(
    rules: Sequence[tuple[str, Compressor]], names: Sequence[str]
) -> dict[str, Compressor]:
    """The compressor of the first rule that matches, by name."""
    chosen = {}
    for name in names:
        found = (coder for pattern, coder in rules if fnmatchcase(name, pattern))
        coder = next(found, None)
        if coder is not None:
            chosen[name] = coder
    missing = [name for name in names if name not in chosen]
    if missing:
        raise ValueError(
            f"compressor: no pattern matches {shown(missing)}; add a last one, "
            '"*", for all others'
        )
    return chosen


def _called(choice: Any, name: str, parameter: torch.Tensor) -> Compressor:
    try:
        return read_compressor(choice(name, parameter))
    except TypeError as error:
        raise TypeError(f"compressor of {name!r}: {error}") from error


def check_patterns(what: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """ValueError for a pattern that matches no name, listing the names."""
    listed = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in listed):
            raise ValueError(
                f"{what}: {pattern!r} matches no parameter; there are: {shown(listed)}"
            )


def shown(names: Sequence[str]) -> str:
    """The names, those that come first where there are many."""
    more = len(names) - _NAMES_SHOWN
    rest = f", and {more} more" if more > 0 else ""
    return ", ".join(names[:_NAMES_SHOWN]) + rest
