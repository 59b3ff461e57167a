"""Numbers that change with the step, and compressors whose fields follow them."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from commkern.compressors import Compressor
from commkern.inputs import checked_int, checked_number

Course = Callable[[int], float]
_STEPS_CHECKED = 4096


@dataclass(frozen=True)
class Exponential:
    """From ``start`` at step 0 to ``end`` at step ``steps``, by a constant factor.

    Stays at ``end``. Numbers are rounded to six digits, so that ranks on machines with
    other mathematical libraries agree. ValueError unless both numbers are above 0 and
    ``steps`` is 1 or more.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = checked_number(name, getattr(self, name))
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        checked_int("steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        """The number at a step."""
        if step >= self.steps:
            return self.end
        factor = (self.end / self.start) ** (step / self.steps)
        return float(f"{self.start * factor:.6g}")

    def known_steps(self) -> Iterable[int]:
        """Steps whose numbers are checked beforehand: all, where they are not many."""
        stride = -(-self.steps // _STEPS_CHECKED)
        return [*range(0, self.steps, stride), self.steps]


@dataclass(frozen=True, init=False)
class Steps:
    """A number that holds from a step on: ``Steps({0: 8, 1000: 4})``.

    Takes a dict or pairs; they are sorted. ValueError unless step 0 is among them.
    """

    values: tuple[tuple[int, float], ...]

    def __init__(
        self, values: Mapping[int, float] | Iterable[tuple[int, float]]
    ) -> None:
        pairs = _pairs(values)
        known = dict(_pair(pair) for pair in pairs)
        if len(known) != len(pairs):
            raise ValueError(f"a step stands twice in {pairs}")
        if 0 not in known:
            raise ValueError(f"a schedule must begin at step 0, got steps {[*known]}")
        object.__setattr__(self, "values", tuple(sorted(known.items())))

    def __call__(self, step: int) -> float:
        """The number at a step."""
        return next(value for first, value in reversed(self.values) if step >= first)

    def known_steps(self) -> Iterable[int]:
        """Steps whose numbers are checked beforehand: all that are listed."""
        return [first for first, _ in self.values]


def _pairs(values: Any) -> list[Any]:
    if isinstance(values, Mapping):
        return list(values.items())
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"values of Steps must be a dict or pairs of (step, number), got {values!r}"
        )
    return list(values)


def _pair(pair: Any) -> tuple[int, float]:
    try:
        step, value = pair
    except (TypeError, ValueError):
        raise ValueError(f"expected a pair (step, number), got {pair!r}") from None
    step = checked_int("a step", step, 0)
    return step, checked_number(f"the number from step {step} on", value)


class FieldSchedules:
    """Fields of compressors by their (dotted) path, each with its course.

    A course is a number, `Exponential`, `Steps` (or the dict or pairs for it) or a
    callable ``step -> number``. ValueError for anything else.
    """

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                "schedule must be a dict of field -> course or None, got "
                f"{type(given).__name__}"
            )
        self._courses = {path: _course(path, c) for path, c in (given or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._courses)

    def __str__(self) -> str:
        texts = (f"{path}={_text(course)}" for path, course in self._courses.items())
        return "{" + ", ".join(sorted(texts)) + "}"

    def at(self, coder: Compressor, step: int) -> Compressor:
        """The compressor with the numbers of a step in the fields that it has.

        Fields of integers take the nearest one, halves upwards. ValueError naming step
        and numbers where a course gives no number and where the compressor refuses it.
        """
        if not self._courses:
            return coder
        numbers = {
            path: _number(path, course, step)
            for path, course in self._courses.items()
            if path in numeric_fields(coder)
        }
        return self._with(coder, numbers, step)

    def known(self, coder: Compressor) -> set[Compressor]:
        """The compressor at every step that is known beforehand; raises as `at`."""
        fixed = {p: c for p, c in self._courses.items() if hasattr(c, "known_steps")}
        paths = fixed.keys() & numeric_fields(coder).keys()
        steps = {0} | {s for path in paths for s in fixed[path].known_steps()}
        found = set()
        for step in sorted(steps):
            numbers = {path: _number(path, fixed[path], step) for path in paths}
            found.add(self._with(coder, numbers, step))
        return found

    def check_fields(self, coders: Iterable[Compressor]) -> None:
        """ValueError for a field that no compressor has."""
        there = sorted({path for coder in coders for path in numeric_fields(coder)})
        for path in self._courses:
            if path not in there:
                raise ValueError(
                    f"no compressor has a number {path!r} to schedule; there are: "
                    f"{', '.join(there) or 'none'}"
                )

    @staticmethod
    def _with(coder: Compressor, numbers: dict[str, float], step: int) -> Compressor:
        try:
            return _replaced(coder, numbers)
        except (TypeError, ValueError) as error:
            listed = ", ".join(f"{path}={value}" for path, value in numbers.items())
            raise ValueError(
                f"schedule gives {listed} at step {step}: {error}"
            ) from None


@functools.lru_cache(maxsize=256)
def numeric_fields(coder: Compressor) -> Mapping[str, bool]:
    """The paths of a compressor's numbers, and whether each is an integer."""
    hints = typing.get_type_hints(type(coder))
    found: dict[str, bool] = {}
    for field in dataclasses.fields(coder):
        value, kinds = getattr(coder, field.name), _kinds(hints[field.name])
        if isinstance(value, Compressor):
            inner = numeric_fields(value).items()
            found |= {f"{field.name}.{path}": whole for path, whole in inner}
        elif bool not in kinds and (int in kinds or float in kinds):
            found[field.name] = float not in kinds
    return found


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) or (hint,)


def _replaced(coder: Compressor, numbers: Mapping[str, float]) -> Compressor:
    whole = numeric_fields(coder)
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, float]] = {}
    for path, value in numbers.items():
        head, _, rest = path.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            changes[head] = math.floor(value + 0.5) if whole[path] else float(value)
    for head, values in inner.items():
        changes[head] = _replaced(getattr(coder, head), values)
    return dataclasses.replace(coder, **changes)


def _course(path: str, course: Any) -> Course:
    if isinstance(course, (Exponential, Steps)):
        return course
    if isinstance(course, (Mapping, list, tuple)):
        return Steps(course)
    if callable(course):
        return typing.cast(Course, course)
    return Steps({0: checked_number(f"schedule of {path!r}", course)})


def _number(path: str, course: Course, step: int) -> float:
    return checked_number(f"schedule of {path!r} at step {step}", course(step))


def _text(course: Course) -> str:
    return repr(course) if isinstance(course, (Exponential, Steps)) else "callable"
