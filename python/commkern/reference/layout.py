"""Reading and checking the arguments that every kernel takes.

Buffers are raw bytes; nothing here assumes alignment. All checks happen before the
first byte is written.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec

import numpy as np

from commkern.arrays import Bytes, as_bytes
from commkern.formats import ROUNDINGS
from commkern.reference.numerics import (
    FORMATS,
    Bits,
    Floats,
    Format,
    exact_arithmetic,
    from_compute,
    to_compute,
)
from commkern.spans import SPAN, SpanTable

P = ParamSpec("P")


class Kernel(Generic[P]):
    """A reference kernel: keyword arguments only, named as in csrc/kernels.

    ``fields`` maps each to its default, or to ``...`` where it must be given.
    """

    def __init__(self, function: Callable[P, None]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        parameters = inspect.signature(function).parameters
        self.name: str = function.__name__
        self.fields: dict[str, Any] = {
            name: ... if p.default is inspect.Parameter.empty else p.default
            for name, p in parameters.items()
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        listed = ", ".join(self.fields)
        if args:
            raise TypeError(f"{self.name} takes keyword arguments only: {listed}")
        for field in kwargs:
            if field not in self.fields:
                raise TypeError(
                    f"{self.name} has no field {field!r}; it takes {listed}"
                )
        for field, default in self.fields.items():
            if default is ... and field not in kwargs:
                raise TypeError(f"{self.name} misses {field!r}; it takes {listed}")
        with exact_arithmetic():
            self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<reference kernel {self.name}({', '.join(self.fields)})>"


def format_of(name: str, field: str = "dtype") -> Format:
    if not isinstance(name, str):
        raise TypeError(f"{field} must be a string, got {type(name).__name__}")
    if name not in FORMATS:
        raise ValueError(f"{field} must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def is_stochastic(rounding: str) -> bool:
    if not isinstance(rounding, str):
        raise TypeError(f"rounding must be a string, got {type(rounding).__name__}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
    return rounding == "stochastic"


def check_word(name: str, value: int, bits: int) -> int:
    """A run-time scalar of ``bits`` bits."""
    number = operator.index(value)
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name} must be in 0..{(1 << bits) - 1}, got {number}")
    return number


def cast_body_nbytes(length: int, wire_dtype: str) -> int:
    """Bytes of one span's elements on the wire (cast.h)."""
    return length * format_of(wire_dtype, "wire_dtype").nbytes


def buffer_of(name: str, value: Any, *, writable: bool = False) -> Bytes:
    if value is None:
        return np.empty(0, dtype=np.uint8)
    raw = as_bytes(value)
    if writable and not raw.flags.writeable:
        raise ValueError(f"{name} must be writable, got read-only memory")
    return raw


def parts_of(values: Sequence[Any]) -> list[Bytes]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"parts must be a list of buffers, got {type(values).__name__}")
    parts = [buffer_of(f"parts[{rank}]", value) for rank, value in enumerate(values)]
    if not parts:
        raise ValueError("parts must hold at least 1 buffer, got 0")
    return parts


def span_rows(spans: SpanTable) -> list[Any]:
    """The checked rows of a span table."""
    if not isinstance(spans, np.ndarray) or spans.dtype != SPAN or spans.ndim != 1:
        raise TypeError(
            f"spans must be a 1-d array of commkern.spans.SPAN, got {_describe(spans)}"
        )
    for index, row in enumerate(spans):
        for field in ("offset", "length", "begin", "body", "earlier", "residual"):
            if row[field] < 0:
                raise ValueError(
                    f"span {index}: {field} must be >= 0, got {row[field]}"
                )
    return list(spans)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"a {value.ndim}-d array of {value.dtype}"
    return type(value).__name__


def check_begins(rows: list[Any], unit: int, field: str = "block_size") -> None:
    for index, row in enumerate(rows):
        if row["begin"] % unit:
            raise ValueError(
                f"span {index}: begin must be a multiple of {field} {unit}, "
                f"got {row['begin']}"
            )


def check_elements(name: str, raw: Bytes, rows: list[Any], itemsize: int) -> None:
    """Every span's elements lie within ``raw``, indexed by offset."""
    for index, row in enumerate(rows):
        end = int(row["offset"]) + int(row["length"])
        _check_end(name, raw, index, end * itemsize)


def check_bodies(
    name: str, raw: Bytes, rows: list[Any], nbytes: Callable[[int], int]
) -> None:
    """Every span's body lies within ``raw``."""
    for index, row in enumerate(rows):
        _check_end(name, raw, index, int(row["body"]) + nbytes(int(row["length"])))


def check_per_row(name: str, raw: Bytes, rows: list[Any], itemsize: int) -> None:
    if raw.size < len(rows) * itemsize:
        raise ValueError(
            f"{name} must hold {itemsize} bytes for each of {len(rows)} spans, "
            f"got {raw.size} bytes"
        )


def _check_end(name: str, raw: Bytes, index: int, end: int) -> None:
    if end > raw.size:
        raise ValueError(f"span {index} needs {end} bytes of {name}, got {raw.size}")


class Residual:
    """The two versions of the error-feedback residual; see csrc/core/types.h."""

    def __init__(self, value: Any, rows: list[Any]) -> None:
        self.present = value is not None
        if not self.present:
            return
        if not isinstance(value, (tuple, list)):
            raise TypeError(
                "residual must be None or (version0, version1[, committed]), "
                f"got {type(value).__name__}"
            )
        if len(value) not in (2, 3):
            raise ValueError(
                "residual must be (version0, version1[, committed]), "
                f"got a tuple of {len(value)}"
            )
        self._versions = [
            buffer_of(f"residual[{version}]", value[version], writable=True)
            for version in range(2)
        ]
        self._committed = (
            as_bytes(value[2]) if len(value) == 3 and value[2] is not None else None
        )
        for index, row in enumerate(rows):
            self._check_row(index, row)

    def _check_row(self, index: int, row: Any) -> None:
        end = (int(row["residual"]) + int(row["length"])) * 4
        for version, raw in enumerate(self._versions):
            _check_end(f"residual[{version}]", raw, index, end)
        if self._committed is None:
            return
        if row["parameter"] >= self._committed.size:
            raise ValueError(
                f"span {index}: parameter must be below {self._committed.size}, the "
                f"size of committed, got {row['parameter']}"
            )

    def _committed_version(self, row: Any) -> int:
        if self._committed is None:
            return 0
        return int(self._committed[row["parameter"]] != 0)

    def _at(self, version: int, row: Any) -> Bytes:
        start, length = int(row["residual"]) * 4, int(row["length"]) * 4
        return self._versions[version][start : start + length]

    def read(self, row: Any) -> Floats:
        """The committed values of the span, fp32."""
        raw = self._at(self._committed_version(row), row)
        values: Floats = raw.copy().view(np.float32)
        return values

    def write(self, row: Any, values: Floats) -> None:
        """Set the version that this step writes where the values are finite in fp32."""
        target = self._at(1 - self._committed_version(row), row)
        kept = values.astype(np.float32)
        target[:] = np.where(np.isfinite(kept), kept, self.read(row)).view(np.uint8)

    def written(self, row: Any) -> Floats:
        """What the version that this step writes holds so far, fp32."""
        raw = self._at(1 - self._committed_version(row), row)
        values: Floats = raw.copy().view(np.float32)
        return values

    def revise(self, row: Any, values: Floats) -> None:
        """Replace it where the values are finite in fp32."""
        target = self._at(1 - self._committed_version(row), row)
        revised = values.astype(np.float32)
        kept = np.where(np.isfinite(revised), revised, self.written(row))
        target[:] = kept.view(np.uint8)

    def add(self, row: Any, values: Floats, where: Bits) -> None:
        """Add to the version that this step writes, one fp32 addition each."""
        target = self._at(1 - self._committed_version(row), row)
        old = target.copy().view(np.float32)
        total = old + values.astype(np.float32)
        target[:] = np.where(where & np.isfinite(total), total, old).view(np.uint8)


def load(raw: Bytes, start: int, length: int, fmt: Format, compute: Any) -> Floats:
    """``length`` elements at byte ``start``, decoded as ``compute``."""
    stored = load_bits(raw, start, length, fmt)
    return to_compute(stored, fmt, compute)


def load_bits(raw: Bytes, start: int, length: int, fmt: Format) -> Bits:
    stored: Bits = raw[start : start + length * fmt.nbytes].copy().view(fmt.storage)
    return stored


def store(raw: Bytes, start: int, values: Floats, fmt: Format) -> Bits:
    """Encode ``values`` at byte ``start``; returns the stored elements."""
    stored = from_compute(values, fmt)
    raw[start : start + stored.nbytes] = np.ascontiguousarray(stored).view(np.uint8)
    return stored
