"""Runs a compiled kernel and its NumPy twin on equal arguments and compares bytes.

Every buffer of the compiled call lies between sentinels, at a chosen distance from a
64-byte boundary. Whatever a kernel must not touch (gaps between spans, its inputs, the
bytes around a buffer) is compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from commkern import reference
from commkern.formats import Format
from commkern.reference.layout import cast_body_nbytes
from commkern.reference.numerics import FORMATS, from_compute, to_compute
from commkern.spans import SPAN

DTYPES = tuple(FORMATS)
GUARD = 64
SENTINEL = 0xA5
# Bytes by which buffers miss a 64-byte boundary; every buffer of a call gets another.
MISALIGNMENTS = (0, 4, 7)


class Guarded:
    """A copy of ``content`` between sentinels, ``shift`` bytes off a boundary."""

    def __init__(self, content: np.ndarray, shift: int) -> None:
        raw = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        self._whole = np.full(raw.size + 2 * GUARD + 128, SENTINEL, dtype=np.uint8)
        start = GUARD + shift
        start += -self._whole.ctypes.data % 64
        self._before = self._whole[:start]
        self._after = self._whole[start + raw.size :]
        self.bytes = self._whole[start : start + raw.size]
        self.bytes[:] = raw

    def check(self, name: str) -> None:
        assert (self._before == SENTINEL).all(), f"{name}: written before its start"
        assert (self._after == SENTINEL).all(), f"{name}: written behind its end"


def _map_buffers(value: Any, copy: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != SPAN:
        return copy(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_buffers(item, copy) for item in value)
    return value


class Copies:
    """Copies of arguments; equal objects (in-place residuals) stay one buffer."""

    def __init__(self, arguments: Mapping[str, Any], shift: int | None) -> None:
        self._shift = shift
        self._made: dict[int, tuple[str, Any]] = {}
        self.arguments = {
            name: _map_buffers(value, lambda array, name=name: self._copy(name, array))
            for name, value in arguments.items()
        }

    def _copy(self, name: str, array: np.ndarray) -> np.ndarray:
        if id(array) not in self._made:
            label = f"{name} #{len(self._made)}"
            if self._shift is None:
                made: Any = array.copy()
            else:
                made = Guarded(array, (self._shift * (1 + 2 * len(self._made))) % 64)
            self._made[id(array)] = label, made
        made = self._made[id(array)][1]
        return made if self._shift is None else made.bytes

    def buffers(self) -> list[tuple[str, np.ndarray]]:
        return [
            (
                label,
                made.view(np.uint8).reshape(-1) if self._shift is None else made.bytes,
            )
            for label, made in self._made.values()
        ]

    def check_sentinels(self) -> None:
        if self._shift is not None:
            for label, made in self._made.values():
                made.check(label)


def compare(
    compiled: Any,
    name: str,
    *,
    shift: int = 0,
    nan_view: Mapping[str, str] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Run ``name`` on both sides; fail on any differing byte. Returns the results.

    ``nan_view`` maps a field to the dtype in which any NaN equals any NaN, for NaNs
    that arithmetic makes (their sign and low bits are no part of the contract).
    """
    __tracebackhide__ = True
    expected, actual = Copies(arguments, None), Copies(arguments, shift)
    getattr(reference, name)(**expected.arguments)
    getattr(compiled, name)(**actual.arguments)
    actual.check_sentinels()
    for (label, want), (_, got) in zip(
        expected.buffers(), actual.buffers(), strict=True
    ):
        view = (nan_view or {}).get(label.split(" ")[0])
        assert_same(got, want, f"{name}: {label}", view)
    return expected.arguments


def assert_same(
    got: np.ndarray, want: np.ndarray, label: str, nan_view: str | None = None
) -> None:
    """Equal bytes; with ``nan_view``, equal elements where two NaNs are equal."""
    __tracebackhide__ = True
    assert got.size == want.size, f"{label}: {got.size} bytes, expected {want.size}"
    if np.array_equal(got, want):
        return
    if nan_view is not None:
        got, want = decode(got, nan_view), decode(want, nan_view)
        differs = ~((got == want) & (np.signbit(got) == np.signbit(want)))
        differs &= ~(np.isnan(got) & np.isnan(want))
    else:
        differs = got != want
    where = np.flatnonzero(differs)
    if where.size:
        first = where[0]
        raise AssertionError(
            f"{label}: {where.size} of {got.size} differ, first at {first}: "
            f"{got[first : first + 4]} instead of {want[first : first + 4]}"
        )


def make_spans(
    lengths: list[int],
    body_nbytes: Callable[[int], int],
    *,
    begins: list[int] | None = None,
    gap: int = 3,
    body_gap: int = 5,
    shuffle: bool = False,
) -> tuple[np.ndarray, int, int, int]:
    """Spans with gaps everywhere: (spans, elements, payload bytes, residual elements).

    Each span is its own parameter. ``shuffle`` puts the residuals in another order.
    """
    spans = np.zeros(len(lengths), dtype=SPAN)
    offset, body = gap, body_gap
    for row, length in enumerate(lengths):
        spans[row]["offset"], spans[row]["length"] = offset, length
        spans[row]["body"], spans[row]["parameter"] = body, row
        spans[row]["parameter_id"] = (0x9E3779B1 * (row + 1)) & 0xFFFFFFFF
        spans[row]["begin"] = begins[row] if begins else 0
        offset, body = offset + length + gap, body + body_nbytes(length) + body_gap
    residual = 2
    order = range(len(lengths))
    for row in reversed(order) if shuffle else order:
        spans[row]["residual"] = residual
        residual += lengths[row] + 1
    return spans, offset, body, residual


def quantize_body(bits: int, block_size: int, dtype: str) -> Callable[[int], int]:
    return format_body(Format(bits=bits, block_size=block_size), dtype)


def format_body(fmt: Format, dtype: str) -> Callable[[int], int]:
    return lambda length: fmt.body_nbytes(length, dtype)


def cast_body(wire_dtype: str) -> Callable[[int], int]:
    return lambda length: cast_body_nbytes(length, wire_dtype)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp64 values as elements of ``dtype`` (uint16 for the 16-bit formats)."""
    with np.errstate(all="ignore"):
        return from_compute(np.asarray(values, dtype=np.float64), FORMATS[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of ``dtype``, or their bytes, as fp64 (exact)."""
    storage = FORMATS[dtype].storage
    with np.errstate(all="ignore"):
        return to_compute(stored.view(storage), FORMATS[dtype], np.dtype(np.float64))


def numbers(seed: int, count: int, dtype: str) -> np.ndarray:
    """Finite elements of many magnitudes, ties and zeros of both signs among them."""
    random = np.random.default_rng([seed, count])
    values = random.standard_normal(count) * 10.0 ** random.integers(-3, 3, count)
    values[random.random(count) < 0.05] = 0.0
    values[random.random(count) < 0.05] = -0.0
    integers = random.random(count) < 0.1
    values[integers] = np.rint(values[integers]) + 0.5
    return encode(np.clip(values, -6e4, 6e4), dtype)


def filler(count: int, dtype: Any = np.uint8) -> np.ndarray:
    """Recognisable content for memory that a kernel may or may not write."""
    return np.resize(
        np.arange(1, 252, dtype=np.uint8), count * np.dtype(dtype).itemsize
    ).view(dtype)


def residuals(
    seed: int, count: int, *, in_place: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Two versions with different values, or the same object twice."""
    random = np.random.default_rng([seed, 7])
    first = random.standard_normal(count).astype(np.float32) * np.float32(0.01)
    second = random.standard_normal(count).astype(np.float32)
    return first, first if in_place else second
