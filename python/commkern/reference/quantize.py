"""Twin of csrc/kernels/quantize.h; its comment is the contract."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from commkern.arrays import Bytes
from commkern.reference.bitpack import pack, packed_nbytes, unpack
from commkern.reference.layout import (
    Kernel,
    Residual,
    buffer_of,
    check_begins,
    check_blocks,
    check_bodies,
    check_elements,
    check_per_row,
    check_word,
    format_of,
    is_stochastic,
    load,
    parts_of,
    quantize_body_nbytes,
    span_rows,
    store,
)
from commkern.reference.numerics import (
    Bits,
    Floats,
    Format,
    block_scale,
    largest_magnitude,
    lift_and_reciprocal,
)
from commkern.reference.philox import draw_bytes
from commkern.spans import SpanTable


class _Settings(NamedTuple):
    """What quantising a span needs besides its values."""

    bits: int
    block_size: int
    stochastic: bool
    seed: int
    step: int
    stream: int

    @property
    def largest_code(self) -> int:
        return int(2 ** (self.bits - 1) - 1)


class _Coded(NamedTuple):
    """One span in coded form; ``finite`` says so for each element's block."""

    scales: Floats
    codes: Bits
    error: Floats
    finite: Bits


def _settings(
    bits: int, block_size: int, rounding: str, seed: int, step: int, stream: int
) -> _Settings:
    check_blocks(bits, block_size)
    return _Settings(
        bits,
        block_size,
        is_stochastic(rounding),
        check_word("seed", seed, 64),
        check_word("step", step, 32),
        check_word("stream", stream, 32),
    )


def _in_blocks(values: Floats, block_size: int) -> Floats:
    """Shape (blocks, block_size), the last block padded with zeros."""
    blocks = -(-values.size // block_size)
    padded = np.zeros(blocks * block_size, dtype=values.dtype)
    padded[: values.size] = values
    return padded.reshape(blocks, block_size)


def _noise(row: Any, shape: tuple[int, int], settings: _Settings, dtype: Any) -> Floats:
    """u = (byte + 0.5) / 256 of every element, in its block's shape."""
    blocks, block_size = shape
    draws_per_block = -(-block_size // 16)
    first = int(row["begin"]) // block_size * draws_per_block
    draws = first + np.arange(blocks * draws_per_block, dtype=np.int64)
    parameter_id = int(row["parameter_id"])
    raw = draw_bytes(draws, parameter_id, settings.step, settings.stream, settings.seed)
    per_block = raw.reshape(blocks, draws_per_block * 16)[:, :block_size]
    noise: Floats = (per_block.astype(dtype) + dtype.type(0.5)) / dtype.type(256)
    return noise


def _encode(values: Floats, row: Any, settings: _Settings) -> _Coded:
    """Quantise one span's values (fp32 or fp64), block by block."""
    number, length = values.dtype.type, values.size
    a = _in_blocks(values, settings.block_size)
    absmax = largest_magnitude(a, axis=1)
    finite = np.isfinite(absmax)
    scales = block_scale(absmax, settings.largest_code)
    lift, reciprocal = lift_and_reciprocal(scales)
    scaled = (a * lift[:, None]) * reciprocal[:, None]
    if settings.stochastic:
        rounded = np.floor(scaled + _noise(row, a.shape, settings, values.dtype))
    else:
        rounded = np.rint(scaled)
    top = number(settings.largest_code)
    clamped = np.minimum(np.maximum(rounded, -top), top)
    usable = (finite & (scales != 0))[:, None]
    codes = np.where(usable, clamped, number(0)).astype(np.int64)
    error = a - codes.astype(values.dtype) * scales[:, None]
    return _Coded(
        np.where(finite, scales, number(np.nan)).astype(values.dtype),
        codes.reshape(-1)[:length],
        error.reshape(-1)[:length],
        np.repeat(finite, settings.block_size)[:length],
    )


def _store_body(payload: Bytes, row: Any, coded: _Coded, bits: int) -> None:
    body = np.concatenate([coded.scales.view(np.uint8), pack(coded.codes, bits)])
    start = int(row["body"])
    payload[start : start + body.size] = body


def _decode(
    payload: Bytes, row: Any, fmt: Format, bits: int, block_size: int
) -> tuple[Floats, Floats]:
    """The values code * s of one span, and its scales."""
    start, length = int(row["body"]), int(row["length"])
    blocks = -(-length // block_size)
    codes_at = start + blocks * fmt.compute.itemsize
    scales = payload[start:codes_at].copy().view(fmt.compute)
    packed = payload[codes_at : codes_at + packed_nbytes(length, bits)]
    codes = unpack(packed, length, bits).astype(fmt.compute)
    return codes * np.repeat(scales, block_size)[:length], scales


@Kernel
def quantize(
    *,
    spans: SpanTable,
    input: Any,
    dtype: str,
    payload: Any,
    residual: Any = None,
    bits: int = 8,
    block_size: int = 128,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
) -> None:
    """Code every span of ``input`` (``dtype`` elements) into ``payload``.

    Raises ValueError for bits, block sizes, spans or buffers out of range.
    """
    settings = _settings(bits, block_size, rounding, seed, step, stream)
    fmt, rows = format_of(dtype), span_rows(spans)
    source, target = (
        buffer_of("input", input),
        buffer_of("payload", payload, writable=True),
    )
    check_begins(rows, block_size)
    check_elements("input", source, rows, fmt.nbytes)
    check_bodies("payload", target, rows, _body_nbytes(bits, block_size, dtype))
    feedback = Residual(residual, rows)
    for row in rows:
        start = int(row["offset"]) * fmt.nbytes
        a = load(source, start, int(row["length"]), fmt, fmt.compute)
        if feedback.present:
            old = feedback.read(row)
            a = a + old.astype(fmt.compute)
        coded = _encode(a, row, settings)
        _store_body(target, row, coded, bits)
        if feedback.present:
            error = coded.error.astype(np.float32)
            feedback.write(row, np.where(coded.finite, error, old))


def _dequantize(
    add: bool,
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    bits: int,
    block_size: int,
    scale: float,
    nonfinite: Any,
) -> None:
    check_blocks(bits, block_size)
    fmt, rows = format_of(dtype), span_rows(spans)
    source = buffer_of("payload", payload)
    target = buffer_of("output", output, writable=True)
    flags = buffer_of("nonfinite", nonfinite, writable=True)
    check_begins(rows, block_size)
    check_bodies("payload", source, rows, _body_nbytes(bits, block_size, dtype))
    check_elements("output", target, rows, fmt.nbytes)
    if nonfinite is not None:
        check_per_row("nonfinite", flags, rows, 1)
    factor = fmt.compute.type(scale)
    for index, row in enumerate(rows):
        values, scales = _decode(source, row, fmt, bits, block_size)
        values = values * factor
        start = int(row["offset"]) * fmt.nbytes
        if add:
            old = load(target, start, int(row["length"]), fmt, fmt.compute)
            values = old + values
        store(target, start, values, fmt)
        if nonfinite is not None and not np.isfinite(scales).all():
            flags[index] = 1


def _body_nbytes(bits: int, block_size: int, dtype: str) -> Any:
    return partial(quantize_body_nbytes, bits=bits, block_size=block_size, dtype=dtype)


@Kernel
def dequantize(
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    bits: int = 8,
    block_size: int = 128,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """Write code * s * ``scale`` of every span to ``output`` (``dtype`` elements).

    ``nonfinite`` (uint8, one a span) becomes 1 where a block's scale is not finite.
    Raises ValueError for bits, block sizes, spans or buffers out of range.
    """
    _dequantize(
        False,
        spans=spans,
        payload=payload,
        output=output,
        dtype=dtype,
        bits=bits,
        block_size=block_size,
        scale=scale,
        nonfinite=nonfinite,
    )


@Kernel
def dequantize_add(
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    bits: int = 8,
    block_size: int = 128,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """As ``dequantize``, added to what ``output`` holds."""
    _dequantize(
        True,
        spans=spans,
        payload=payload,
        output=output,
        dtype=dtype,
        bits=bits,
        block_size=block_size,
        scale=scale,
        nonfinite=nonfinite,
    )


@Kernel
def requantize_sum(
    *,
    spans: SpanTable,
    parts: Sequence[Any],
    dtype: str,
    payload: Any,
    residual: Any = None,
    bits: int = 8,
    block_size: int = 128,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
) -> None:
    """Decode ``parts``, add them in rank order, code the sum into ``payload``.

    The coding error is added to the residual version that this step writes. Raises
    ValueError for bits, block sizes, spans or buffers out of range.
    """
    settings = _settings(bits, block_size, rounding, seed, step, stream)
    fmt, rows = format_of(dtype), span_rows(spans)
    sources = parts_of(parts)
    target = buffer_of("payload", payload, writable=True)
    check_begins(rows, block_size)
    nbytes = _body_nbytes(bits, block_size, dtype)
    for rank, source in enumerate(sources):
        check_bodies(f"parts[{rank}]", source, rows, nbytes)
    check_bodies("payload", target, rows, nbytes)
    feedback = Residual(residual, rows)
    for row in rows:
        acc, _ = _decode(sources[0], row, fmt, bits, block_size)
        for source in sources[1:]:
            acc = acc + _decode(source, row, fmt, bits, block_size)[0]
        coded = _encode(acc, row, settings)
        _store_body(target, row, coded, bits)
        if feedback.present:
            feedback.add(row, coded.error, coded.finite)
