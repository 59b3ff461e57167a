"""Twin of csrc/kernels/fixed_point.h; its comment is the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from commkern.arrays import Bytes
from commkern.formats import check_block_size
from commkern.reference.layout import (
    Kernel,
    Residual,
    buffer_of,
    check_begins,
    check_bodies,
    check_elements,
    check_per_row,
    check_word,
    format_of,
    is_stochastic,
    load,
    parts_of,
    span_rows,
    store,
)
from commkern.reference.numerics import Bits, Floats, Format, magnitude_bits
from commkern.reference.philox import draw_bytes
from commkern.spans import SpanTable

_SUPPORTED_BITS = (8, 16, 32)


class _Exponents(NamedTuple):
    """How the exponents of a compute type are made and stored."""

    fraction_bits: int
    bias: int
    special: int
    stored: np.dtype[Any]

    def nbytes(self, length: int, block_size: int) -> int:
        return -(-length // block_size) * self.stored.itemsize

    def read(self, raw: Bytes, start: int, length: int, block_size: int) -> Bits:
        end = start + self.nbytes(length, block_size)
        exponents: Bits = raw[start:end].copy().view(self.stored).astype(np.int64)
        return exponents


_F32 = _Exponents(23, 127, 255, np.dtype("u1"))
_HALF_TOP = 142  # biased, of the largest fp16 numbers in fp32
_F64 = _Exponents(52, 1023, 2047, np.dtype("<u2"))


def _exponents_of(fmt: Format) -> _Exponents:
    return _F64 if fmt.compute.itemsize == 8 else _F32


class _Settings(NamedTuple):
    """What coding a span needs besides its values."""

    bits: int
    block_size: int
    digits: int
    largest: int
    stochastic: bool
    seed: int
    step: int
    stream: int


def _codes_nbytes(length: int, bits: int) -> int:
    return length * (bits // 8)


def _check_bits(bits: int) -> None:
    if bits not in _SUPPORTED_BITS:
        raise ValueError(f"bits must be one of 8, 16, 32, got {bits}")


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be in 1..{most}, got {value}")


def _check_agreed(name: str, raw: Bytes, rows: list[Any], nbytes: Any) -> None:
    """The exponents of every span, at ``earlier``, lie within ``raw``."""
    for index, row in enumerate(rows):
        end = int(row["earlier"]) + nbytes(int(row["length"]))
        if end > raw.size:
            raise ValueError(
                f"span {index} needs {end} bytes of {name}, got {raw.size}"
            )


def _in_blocks(values: Floats, block_size: int) -> Floats:
    """Shape (blocks, block_size), the last block padded with zeros."""
    blocks = -(-values.size // block_size)
    padded = np.zeros(blocks * block_size, dtype=values.dtype)
    padded[: values.size] = values
    return padded.reshape(blocks, block_size)


def _scales(exponents: Bits, digits: int, dtype: np.dtype[Any]) -> Floats:
    """s of each block; NaN where it is not finite."""
    kind = _F64 if dtype.itemsize == 8 else _F32
    smallest = 1 - kind.bias - kind.fraction_bits
    powers = np.maximum(exponents + 1 - kind.bias - digits, smallest)
    finite = exponents < kind.special
    scales = np.ldexp(dtype.type(1), np.where(finite, powers, 0).astype(np.int32))
    marked: Floats = np.where(finite, scales, dtype.type(np.nan)).astype(dtype)
    return marked


def _limits(exponents: Bits, settings: _Settings, fmt: Format) -> Floats:
    """The largest code of each block, as a number of the compute type."""
    dtype = fmt.compute
    top = _exponents_of(fmt).special - 1 if fmt.name != "float16" else _HALF_TOP
    below = min(settings.largest, 2**settings.digits - 1)
    whole = np.where(exponents == top, below, settings.largest)
    nearest = whole.astype(dtype)
    above = nearest.astype(np.int64) > whole
    limits: Floats = np.where(above, np.nextafter(nearest, dtype.type(0)), nearest)
    return limits


def _noise(row: Any, shape: tuple[int, int], settings: _Settings, dtype: Any) -> Floats:
    """u = (byte + 0.5) / 256 of every element, in its block's shape."""
    blocks, block_size = shape
    per_block = -(-block_size // 16)
    first = int(row["begin"]) // block_size * per_block
    draws = first + np.arange(blocks * per_block, dtype=np.int64)
    parameter_id = int(row["parameter_id"])
    raw = draw_bytes(draws, parameter_id, settings.step, settings.stream, settings.seed)
    taken = raw.reshape(blocks, per_block * 16)[:, :block_size]
    noise: Floats = (taken.astype(dtype) + dtype.type(0.5)) / dtype.type(256)
    return noise


def _encode(
    values: Floats, exponents: Bits, row: Any, settings: _Settings, fmt: Format
) -> tuple[Bits, Floats, Bits]:
    """Codes of one span, the errors, and whether each element's block is finite."""
    number, length = values.dtype.type, values.size
    a = _in_blocks(values, settings.block_size)
    scales = _scales(exponents, settings.digits, values.dtype)[:, None]
    lift = np.where(scales < number(2.0**-100), number(2.0**100), number(1))
    p = (a * lift) * (number(1) / (scales * lift))
    limits = _limits(exponents, settings, fmt)[:, None]
    p = np.where(p < limits, p, limits)
    p = np.where(p > -limits, p, -limits)
    if settings.stochastic:
        below = np.floor(p)
        rest = (p - below) + _noise(row, a.shape, settings, values.dtype)
        codes = below.astype(np.int64) + (rest >= 1)
    else:
        codes = np.rint(p).astype(np.int64)
    finite = np.isfinite(scales)
    codes = np.where(finite, codes, 0)
    error = a - codes.astype(values.dtype) * scales
    where = np.broadcast_to(finite, a.shape)
    return (
        codes.reshape(-1)[:length],
        error.reshape(-1)[:length],
        where.reshape(-1)[:length],
    )


@Kernel
def block_exponents(
    *,
    spans: SpanTable,
    input: Any,
    dtype: str,
    payload: Any,
    residual: Any = None,
    block_size: int = 256,
) -> None:
    """Write the exponent of the largest magnitude of every block of ``input``.

    Raises ValueError for dtypes, block sizes, spans or buffers out of range.
    """
    check_block_size(block_size)
    fmt, rows = format_of(dtype), span_rows(spans)
    kind = _exponents_of(fmt)
    source = buffer_of("input", input)
    target = buffer_of("payload", payload, writable=True)
    check_begins(rows, block_size)
    check_elements("input", source, rows, fmt.nbytes)
    check_bodies("payload", target, rows, partial(kind.nbytes, block_size=block_size))
    feedback = Residual(residual, rows)
    for row in rows:
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        a = load(source, start, length, fmt, fmt.compute)
        if feedback.present:
            a = a + feedback.read(row).astype(fmt.compute)
        bits = magnitude_bits(_in_blocks(a, block_size))
        most = np.max(bits, axis=1, initial=0)
        found = (most >> most.dtype.type(kind.fraction_bits)).astype(kind.stored)
        body = int(row["body"])
        target[body : body + found.nbytes] = found.view(np.uint8)


def _combine(
    op: Callable[[Bits, Bits], Bits],
    sources: list[Bytes],
    target: Bytes,
    rows: list[Any],
    word: Any,
    nbytes: Callable[[int], int],
) -> None:
    """Combine the words of the parts' bodies, in rank order."""
    for rank, source in enumerate(sources):
        check_bodies(f"parts[{rank}]", source, rows, nbytes)
    check_bodies("payload", target, rows, nbytes)
    for row in rows:
        start, end = int(row["body"]), int(row["body"]) + nbytes(int(row["length"]))
        acc = sources[0][start:end].copy().view(word)
        for source in sources[1:]:
            acc = op(acc, source[start:end].copy().view(word))
        target[start:end] = acc.view(np.uint8)


@Kernel
def max_exponents(
    *,
    spans: SpanTable,
    parts: Sequence[Any],
    dtype: str,
    payload: Any,
    block_size: int = 256,
) -> None:
    """Write the largest exponent over ``parts`` of every block.

    Raises ValueError for dtypes, block sizes, spans or buffers out of range.
    """
    check_block_size(block_size)
    kind, rows = _exponents_of(format_of(dtype)), span_rows(spans)
    check_begins(rows, block_size)
    target = buffer_of("payload", payload, writable=True)
    nbytes = partial(kind.nbytes, block_size=block_size)
    _combine(np.maximum, parts_of(parts), target, rows, kind.stored, nbytes)


@Kernel
def fixed_quantize(
    *,
    spans: SpanTable,
    input: Any,
    dtype: str,
    exponents: Any,
    payload: Any,
    residual: Any = None,
    bits: int = 16,
    block_size: int = 256,
    digits: int = 15,
    largest: int = 32767,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
) -> None:
    """Code every span of ``input`` as integers, with the agreed ``exponents``.

    Raises ValueError for bits, block sizes, digits, codes, spans or buffers out of
    range.
    """
    _check_bits(bits)
    _check_range("digits", digits, bits - 1)
    _check_range("largest", largest, 2 ** (bits - 1) - 1)
    check_block_size(block_size)
    settings = _Settings(
        bits,
        block_size,
        digits,
        largest,
        is_stochastic(rounding),
        check_word("seed", seed, 64),
        check_word("step", step, 32),
        check_word("stream", stream, 32),
    )
    fmt, rows = format_of(dtype), span_rows(spans)
    kind = _exponents_of(fmt)
    source, agreed = buffer_of("input", input), buffer_of("exponents", exponents)
    target = buffer_of("payload", payload, writable=True)
    check_begins(rows, block_size)
    check_elements("input", source, rows, fmt.nbytes)
    nbytes = partial(kind.nbytes, block_size=block_size)
    _check_agreed("exponents", agreed, rows, nbytes)
    check_bodies("payload", target, rows, partial(_codes_nbytes, bits=bits))
    feedback = Residual(residual, rows)
    for row in rows:
        length, body = int(row["length"]), int(row["body"])
        a = load(source, int(row["offset"]) * fmt.nbytes, length, fmt, fmt.compute)
        if feedback.present:
            old = feedback.read(row)
            a = a + old.astype(fmt.compute)
        given = kind.read(agreed, int(row["earlier"]), length, block_size)
        codes, error, finite = _encode(a, given, row, settings, fmt)
        raw = codes.astype(f"<i{bits // 8}").view(np.uint8)
        target[body : body + raw.size] = raw
        if feedback.present:
            feedback.write(row, np.where(finite, error.astype(np.float32), old))


@Kernel
def fixed_sum(
    *, spans: SpanTable, parts: Sequence[Any], payload: Any, bits: int = 16
) -> None:
    """Add the codes of ``parts`` as integers, modulo 2^bits.

    Raises ValueError for bits, spans or buffers out of range.
    """
    _check_bits(bits)
    rows, target = span_rows(spans), buffer_of("payload", payload, writable=True)
    word, nbytes = np.dtype(f"<u{bits // 8}"), partial(_codes_nbytes, bits=bits)
    _combine(np.add, parts_of(parts), target, rows, word, nbytes)


def _dequantize(
    add: bool,
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    bits: int,
    block_size: int,
    digits: int,
    scale: float,
    nonfinite: Any,
) -> None:
    _check_bits(bits)
    _check_range("digits", digits, bits - 1)
    check_block_size(block_size)
    fmt, rows = format_of(dtype), span_rows(spans)
    kind, source = _exponents_of(fmt), buffer_of("payload", payload)
    target = buffer_of("output", output, writable=True)
    flags = buffer_of("nonfinite", nonfinite, writable=True)
    check_begins(rows, block_size)
    nbytes = partial(kind.nbytes, block_size=block_size)
    _check_agreed("payload", source, rows, nbytes)
    check_bodies("payload", source, rows, partial(_codes_nbytes, bits=bits))
    check_elements("output", target, rows, fmt.nbytes)
    if nonfinite is not None:
        check_per_row("nonfinite", flags, rows, 1)
    factor = fmt.compute.type(scale)
    for index, row in enumerate(rows):
        length, body = int(row["length"]), int(row["body"])
        raw = source[body : body + _codes_nbytes(length, bits)].copy()
        codes = raw.view(f"<i{bits // 8}").astype(fmt.compute)
        agreed = kind.read(source, int(row["earlier"]), length, block_size)
        scales = np.repeat(_scales(agreed, digits, fmt.compute), block_size)[:length]
        values = (codes * factor) * scales
        start = int(row["offset"]) * fmt.nbytes
        if add:
            values = load(target, start, length, fmt, fmt.compute) + values
        store(target, start, values, fmt)
        written = load(target, start, length, fmt, fmt.compute)
        if nonfinite is not None and not np.isfinite(written).all():
            flags[index] = 1


@Kernel
def fixed_dequantize(
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    bits: int = 16,
    block_size: int = 256,
    digits: int = 15,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """Write code * ``scale`` * s of every span to ``output`` (``dtype`` elements).

    ``nonfinite`` (uint8, one a span) becomes 1 where a written value is not finite.
    Raises ValueError for bits, block sizes, digits, spans or buffers out of range.
    """
    _dequantize(
        False,
        spans=spans,
        payload=payload,
        output=output,
        dtype=dtype,
        bits=bits,
        block_size=block_size,
        digits=digits,
        scale=scale,
        nonfinite=nonfinite,
    )


@Kernel
def fixed_dequantize_add(
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    bits: int = 16,
    block_size: int = 256,
    digits: int = 15,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """As ``fixed_dequantize``, added to what ``output`` holds."""
    _dequantize(
        True,
        spans=spans,
        payload=payload,
        output=output,
        dtype=dtype,
        bits=bits,
        block_size=block_size,
        digits=digits,
        scale=scale,
        nonfinite=nonfinite,
    )
