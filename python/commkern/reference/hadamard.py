"""Twin of csrc/kernels/hadamard.h; its comments are the contract.

Source: the randomised Hadamard transform of N. Ailon and B. Chazelle, "Approximate
nearest neighbors and the fast Johnson-Lindenstrauss transform", STOC'06, before a
quantiser as in A. Suresh et al., "Distributed mean estimation with limited
communication", ICML'17.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from commkern.reference.layout import (
    Kernel,
    buffer_of,
    check_begins,
    check_elements,
    check_word,
    format_of,
    load,
    span_rows,
    store,
)
from commkern.reference.numerics import Floats
from commkern.reference.philox import draw_bytes
from commkern.spans import SpanTable

STREAM = 2 << 24 | 0xFFFE  # purpose 2, shared by all ranks
ROTATIONS = tuple(1 << k for k in range(5, 13))
_SIGNS_PER_DRAW = 128


def rotate(
    values: Floats, begin: int, parameter_id: int, seed: int, rotation: int
) -> Floats:
    """The randomised Hadamard transform of one span, in pieces of ``rotation`` values.

    ``values``: shape (n,), fp32 or fp64, which the arithmetic happens in. ``begin``:
    index of ``values[0]`` within its parameter. Returns a new array.
    """
    return _transform(values * _signs(values, begin, parameter_id, seed), rotation)


def unrotate(
    values: Floats, begin: int, parameter_id: int, seed: int, rotation: int
) -> Floats:
    """The inverse of `rotate`, up to rounding; same arguments."""
    result: Floats = _transform(values, rotation)
    result *= _signs(values, begin, parameter_id, seed)
    return result


def _signs(values: Floats, begin: int, parameter_id: int, seed: int) -> Floats:
    """1 or -1 for each value, in its type."""
    first, last = begin // _SIGNS_PER_DRAW, -(-(begin + values.size) // _SIGNS_PER_DRAW)
    raw = draw_bytes(np.arange(first, last), parameter_id, 0, STREAM, seed)
    bits = np.unpackbits(raw.reshape(-1), bitorder="little")
    start = begin - first * _SIGNS_PER_DRAW
    minus = bits[start : start + values.size] != 0
    signs: Floats = np.where(minus, values.dtype.type(-1), values.dtype.type(1))
    return signs


def _transform(values: Floats, rotation: int) -> Floats:
    result = np.empty_like(values)
    for start, stop, size in _pieces(values.size, rotation):
        pieces = values[start:stop].reshape(-1, size)
        result[start:stop] = _butterflies(pieces).reshape(-1) * _factor(size, values)
    return result


def _pieces(length: int, rotation: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size): pieces of ``size`` values each, the tail's one by one."""
    start, size = 0, rotation
    while start < length:
        stop = start + (length - start) // size * size
        if stop > start:
            yield start, stop, size
        start, size = stop, size // 2


def _butterflies(pieces: Floats) -> Floats:
    """The Walsh-Hadamard transform of every row, natural order, not scaled."""
    count, size = pieces.shape
    half = 1
    while half < size:
        pairs = pieces.reshape(count, -1, 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        pieces = np.stack((left + right, left - right), axis=2)
        half *= 2
    return pieces.reshape(count, size)


def _factor(size: int, values: Floats) -> Any:
    """1 / sqrt(size), rounded once to the type of ``values``."""
    number = values.dtype.type
    exponent = size.bit_length() - 1
    root = np.sqrt(number(0.5)) if exponent % 2 else number(1)
    return number(root * number(2.0 ** -(exponent // 2)))


def check_rotation(rotation: int) -> None:
    if rotation not in ROTATIONS:
        raise ValueError(
            f"rotation must be a power of two in {ROTATIONS[0]}..{ROTATIONS[-1]}, "
            f"got {rotation}"
        )


@Kernel
def hadamard(
    *,
    spans: SpanTable,
    input: Any,
    output: Any,
    dtype: str,
    rotation: int = 128,
    inverse: int = 0,
    seed: int = 0,
) -> None:
    """Write the randomised Hadamard transform of ``input``, or its inverse.

    Both hold ``dtype`` elements and may be the same memory. Raises ValueError for
    dtypes, spans, buffers, rotations or scalars out of range.
    """
    fmt, rows = format_of(dtype), span_rows(spans)
    check_rotation(rotation)
    if inverse not in (0, 1):
        raise ValueError(f"inverse must be 0 or 1, got {inverse}")
    seed = check_word("seed", seed, 64)
    check_begins(rows, rotation, "rotation")
    source, target = (
        buffer_of("input", input),
        buffer_of("output", output, writable=True),
    )
    check_elements("input", source, rows, fmt.nbytes)
    check_elements("output", target, rows, fmt.nbytes)
    turn = unrotate if inverse else rotate
    for row in rows:
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        values = load(source, start, length, fmt, fmt.compute)
        key = int(row["begin"]), int(row["parameter_id"]), seed, rotation
        store(target, start, turn(values, *key), fmt)
