"""Twin of csrc/kernels/quantize.h; its comment is the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from commkern.arrays import Bytes
from commkern.formats import Format
from commkern.reference.codes import Input, decode, encode, pack_codes, unpack_codes
from commkern.reference.hadamard import rotate, unrotate
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
from commkern.reference.numerics import Bits, Floats, lift_and_reciprocal, to_compute
from commkern.reference.philox import draw_bytes
from commkern.reference.scales import Scales, read_scales, scales_of
from commkern.spans import SpanTable


class _Settings(NamedTuple):
    """What quantising a span needs besides its values."""

    fmt: Format
    stochastic: bool
    seed: int
    step: int
    stream: int


class _Coded(NamedTuple):
    """One span in coded form, and what it decodes to: NaN where a group is spoilt."""

    body: Bytes
    values: Floats


def _settings(
    fmt: Format, rounding: str, seed: int, step: int, stream: int
) -> _Settings:
    fmt.check(rounding)
    return _Settings(
        fmt,
        is_stochastic(rounding),
        check_word("seed", seed, 64),
        check_word("step", step, 32),
        check_word("stream", stream, 32),
    )


def _check_unit(rows: list[Any], fmt: Format) -> None:
    check_begins(rows, fmt.block_size)
    if fmt.rotation:
        check_begins(rows, fmt.rotation, "rotation")


def _check_bodies(
    name: str, raw: Bytes, rows: list[Any], fmt: Format, dtype: str
) -> None:
    check_bodies(name, raw, rows, lambda length: fmt.body_nbytes(length, dtype))


def _not_empty(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row["length"]]


def _draw(row: Any, length: int, settings: _Settings) -> Bits:
    """The random byte of every element."""
    block_size = settings.fmt.block_size
    draws_per_block = -(-block_size // 16)
    first = int(row["begin"]) // block_size * draws_per_block
    blocks = settings.fmt.blocks(length)
    draws = first + np.arange(blocks * draws_per_block, dtype=np.int64)
    parameter_id = int(row["parameter_id"])
    raw = draw_bytes(draws, parameter_id, settings.step, settings.stream, settings.seed)
    per_block = raw.reshape(blocks, draws_per_block * 16)[:, :block_size]
    return per_block.reshape(-1)[:length]


def _encode(values: Floats, row: Any, settings: _Settings) -> _Coded:
    """Quantise one span's values (fp32 or fp64)."""
    fmt, length = settings.fmt, values.size
    scales = scales_of(values, fmt)
    item = Input(
        values,
        _positions(values, scales, fmt),
        scales.spread(scales.scale, length, fmt),
        _draw(row, length, settings) if settings.stochastic else None,
    )
    usable = np.isfinite(item.scale) & (item.scale != 0)
    harmless = item._replace(position=np.where(usable, item.position, 0))
    codes = np.where(usable, encode(harmless, fmt), 0)
    body = np.concatenate([scales.stored, pack_codes(codes, fmt)])
    return _Coded(body, _values(codes, scales, fmt, values.dtype))


def _positions(values: Floats, scales: Scales, fmt: Format) -> Floats:
    """p = (a - offset) / s, by a reciprocal."""
    magnitude = np.abs(scales.scale)
    if fmt.scales in ("e8m0", "ocp"):
        lift, reciprocal = np.ones_like(magnitude), 1 / magnitude
    else:
        lift, reciprocal = lift_and_reciprocal(magnitude)
    lift = scales.spread(lift, values.size, fmt)
    reciprocal = scales.spread(reciprocal, values.size, fmt)
    if scales.offset is not None:
        halved = scales.spread(scales.scale, values.size, fmt) < 0
        values = np.where(halved, values * values.dtype.type(0.5), values)
        values = values - scales.spread(scales.offset, values.size, fmt)
    return (values * lift) * reciprocal


def _values(codes: Bits, scales: Scales, fmt: Format, compute: Any) -> Floats:
    """What codes decode to."""
    scale = scales.spread(scales.scale, codes.size, fmt)
    values = decode(codes, fmt, compute)
    if scales.offset is None:
        return values * scale
    offset = scales.spread(scales.offset, codes.size, fmt)
    values = values * np.abs(scale) + offset
    return np.where(scale < 0, values * compute.type(2), values)


def _decode(payload: Bytes, row: Any, fmt: Format, dtype: str) -> tuple[Floats, Floats]:
    """The values of one span, still rotated, and its scales."""
    start, length = int(row["body"]), int(row["length"])
    body = payload[start : start + fmt.body_nbytes(length, dtype)]
    scales = read_scales(body, length, fmt, dtype)
    codes = unpack_codes(body[scales.stored.size :], length, fmt)
    compute = format_of(dtype).compute
    return _values(codes, scales, fmt, compute), scales.scale


def _rotated(values: Floats, row: Any, fmt: Format) -> Floats:
    if not fmt.rotation:
        return values
    return rotate(values, int(row["begin"]), 0, 0, fmt.rotation)


def _unrotated(values: Floats, row: Any, fmt: Format) -> Floats:
    """Signs are the same for all: a payload holds neither seed nor name."""
    if not fmt.rotation:
        return values
    return unrotate(values, int(row["begin"]), 0, 0, fmt.rotation)


def _put(payload: Bytes, row: Any, body: Bytes) -> None:
    start = int(row["body"])
    payload[start : start + body.size] = body


@Kernel
def quantize(
    *,
    spans: SpanTable,
    input: Any,
    dtype: str,
    payload: Any,
    residual: Any = None,
    code: str = "symmetric",
    bits: int = 8,
    block_size: int = 128,
    scales: str = "compute",
    statistic: str = "absmax",
    constant: float = 1.0,
    rotation: int = 0,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
) -> None:
    """Code every span of ``input`` (``dtype`` elements) into ``payload``.

    Raises ValueError for formats, spans or buffers out of range.
    """
    fmt = Format(code, bits, block_size, scales, statistic, constant, rotation)
    settings = _settings(fmt, rounding, seed, step, stream)
    kind, rows = format_of(dtype), span_rows(spans)
    source, target = (
        buffer_of("input", input),
        buffer_of("payload", payload, writable=True),
    )
    _check_unit(rows, fmt)
    check_elements("input", source, rows, kind.nbytes)
    _check_bodies("payload", target, rows, fmt, dtype)
    feedback = Residual(residual, rows)
    for row in _not_empty(rows):
        start = int(row["offset"]) * kind.nbytes
        a = load(source, start, int(row["length"]), kind, kind.compute)
        if feedback.present:
            a = a + feedback.read(row).astype(kind.compute)
        coded = _encode(_rotated(a, row, fmt), row, settings)
        _put(target, row, coded.body)
        if feedback.present:
            feedback.write(row, a - _unrotated(coded.values, row, fmt))


def _dequantize(
    add: bool,
    fmt: Format,
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    scale: float,
    nonfinite: Any,
) -> None:
    fmt.check()
    kind, rows = format_of(dtype), span_rows(spans)
    source = buffer_of("payload", payload)
    target = buffer_of("output", output, writable=True)
    flags = buffer_of("nonfinite", nonfinite, writable=True)
    _check_unit(rows, fmt)
    _check_bodies("payload", source, rows, fmt, dtype)
    check_elements("output", target, rows, kind.nbytes)
    if nonfinite is not None:
        check_per_row("nonfinite", flags, rows, 1)
    factor = kind.compute.type(scale)
    for index, row in enumerate(rows):
        if row["length"] == 0:
            continue
        values, scales = _decode(source, row, fmt, dtype)
        values = _unrotated(values, row, fmt) * factor
        start = int(row["offset"]) * kind.nbytes
        if add:
            old = load(target, start, int(row["length"]), kind, kind.compute)
            values = old + values
        stored = to_compute(store(target, start, values, kind), kind, kind.compute)
        finite = np.isfinite(scales).all()
        if kind.nbytes == 2 or fmt.rotation:  # these can overflow
            finite &= np.isfinite(stored).all()
        if nonfinite is not None and not finite:
            flags[index] = 1


@Kernel
def dequantize(
    *,
    spans: SpanTable,
    payload: Any,
    output: Any,
    dtype: str,
    code: str = "symmetric",
    bits: int = 8,
    block_size: int = 128,
    scales: str = "compute",
    statistic: str = "absmax",
    constant: float = 1.0,
    rotation: int = 0,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """Write the decoded values times ``scale`` to ``output`` (``dtype`` elements).

    ``nonfinite`` (uint8, one a span) becomes 1 where a block's scale is not finite, or
    a written value that can overflow: of 16 bits, or behind a rotation.
    Raises ValueError for formats, spans or buffers out of range.
    """
    _dequantize(
        False,
        Format(code, bits, block_size, scales, statistic, constant, rotation),
        spans=spans,
        payload=payload,
        output=output,
        dtype=dtype,
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
    code: str = "symmetric",
    bits: int = 8,
    block_size: int = 128,
    scales: str = "compute",
    statistic: str = "absmax",
    constant: float = 1.0,
    rotation: int = 0,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """As ``dequantize``, added to what ``output`` holds."""
    _dequantize(
        True,
        Format(code, bits, block_size, scales, statistic, constant, rotation),
        spans=spans,
        payload=payload,
        output=output,
        dtype=dtype,
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
    code: str = "symmetric",
    bits: int = 8,
    block_size: int = 128,
    scales: str = "compute",
    statistic: str = "absmax",
    constant: float = 1.0,
    rotation: int = 0,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
) -> None:
    """Decode ``parts``, add them in rank order, code the sum into ``payload``.

    The coding error is added to the residual version that this step writes. Raises
    ValueError for formats, spans or buffers out of range.
    """
    fmt = Format(code, bits, block_size, scales, statistic, constant, rotation)
    settings = _settings(fmt, rounding, seed, step, stream)
    rows = span_rows(spans)
    format_of(dtype)
    sources = parts_of(parts)
    target = buffer_of("payload", payload, writable=True)
    _check_unit(rows, fmt)
    for rank, source in enumerate(sources):
        _check_bodies(f"parts[{rank}]", source, rows, fmt, dtype)
    _check_bodies("payload", target, rows, fmt, dtype)
    feedback = Residual(residual, rows)
    for row in _not_empty(rows):
        acc, _ = _decode(sources[0], row, fmt, dtype)
        for source in sources[1:]:
            acc = acc + _decode(source, row, fmt, dtype)[0]
        coded = _encode(acc, row, settings)
        _put(target, row, coded.body)
        if feedback.present:
            error = _unrotated(acc - coded.values, row, fmt)
            feedback.add(row, error, np.isfinite(error))
