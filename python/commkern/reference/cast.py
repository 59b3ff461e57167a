"""Twin of csrc/kernels/cast.h; its comment is the contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from commkern.reference.layout import (
    Kernel,
    Residual,
    buffer_of,
    cast_body_nbytes,
    check_bodies,
    check_elements,
    check_per_row,
    format_of,
    load,
    load_bits,
    parts_of,
    span_rows,
    store,
)
from commkern.reference.numerics import to_compute
from commkern.spans import SpanTable


@Kernel
def cast(
    *,
    spans: SpanTable,
    input: Any,
    dtype: str,
    payload: Any,
    wire_dtype: str,
    residual: Any = None,
) -> None:
    """Write every span of ``input`` as ``wire_dtype`` elements into ``payload``.

    Raises ValueError for dtypes, spans or buffers out of range.
    """
    fmt, wire, rows = (
        format_of(dtype),
        format_of(wire_dtype, "wire_dtype"),
        span_rows(spans),
    )
    source, target = (
        buffer_of("input", input),
        buffer_of("payload", payload, writable=True),
    )
    check_elements("input", source, rows, fmt.nbytes)
    check_bodies(
        "payload", target, rows, partial(cast_body_nbytes, wire_dtype=wire_dtype)
    )
    feedback = Residual(residual, rows)
    for row in rows:
        start, length, body = int(row["offset"]), int(row["length"]), int(row["body"])
        if fmt is wire and not feedback.present:
            raw = load_bits(source, start * fmt.nbytes, length, fmt).view(np.uint8)
            target[body : body + raw.size] = raw
            continue
        a = load(source, start * fmt.nbytes, length, fmt, fmt.compute)
        if feedback.present:
            old = feedback.read(row)
            a = a + old.astype(fmt.compute)
        sent = to_compute(store(target, body, a, wire), wire, fmt.compute)
        if feedback.present:
            error = (a - sent).astype(np.float32)
            feedback.write(row, np.where(np.isfinite(sent), error, old))


def _uncast(
    add: bool,
    *,
    spans: SpanTable,
    payload: Any,
    wire_dtype: str,
    output: Any,
    dtype: str,
    scale: float,
    nonfinite: Any,
) -> None:
    fmt, wire, rows = (
        format_of(dtype),
        format_of(wire_dtype, "wire_dtype"),
        span_rows(spans),
    )
    source = buffer_of("payload", payload)
    target = buffer_of("output", output, writable=True)
    flags = buffer_of("nonfinite", nonfinite, writable=True)
    check_bodies(
        "payload", source, rows, partial(cast_body_nbytes, wire_dtype=wire_dtype)
    )
    check_elements("output", target, rows, fmt.nbytes)
    if nonfinite is not None:
        check_per_row("nonfinite", flags, rows, 1)
    factor = fmt.compute.type(scale)
    for index, row in enumerate(rows):
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        values = load(source, int(row["body"]), length, wire, fmt.compute) * factor
        if add:
            values = load(target, start, length, fmt, fmt.compute) + values
        stored = to_compute(store(target, start, values, fmt), fmt, fmt.compute)
        if nonfinite is not None and not np.isfinite(stored).all():
            flags[index] = 1


@Kernel
def uncast(
    *,
    spans: SpanTable,
    payload: Any,
    wire_dtype: str,
    output: Any,
    dtype: str,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """Write every span of ``payload`` times ``scale`` to ``output``.

    ``nonfinite`` (uint8, one a span) becomes 1 where a written value is not finite.
    Raises ValueError for dtypes, spans or buffers out of range.
    """
    _uncast(
        False,
        spans=spans,
        payload=payload,
        wire_dtype=wire_dtype,
        output=output,
        dtype=dtype,
        scale=scale,
        nonfinite=nonfinite,
    )


@Kernel
def uncast_add(
    *,
    spans: SpanTable,
    payload: Any,
    wire_dtype: str,
    output: Any,
    dtype: str,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """As ``uncast``, added to what ``output`` holds."""
    _uncast(
        True,
        spans=spans,
        payload=payload,
        wire_dtype=wire_dtype,
        output=output,
        dtype=dtype,
        scale=scale,
        nonfinite=nonfinite,
    )


@Kernel
def recast_sum(
    *,
    spans: SpanTable,
    parts: Sequence[Any],
    dtype: str,
    payload: Any,
    wire_dtype: str,
    residual: Any = None,
    wire_scale: float = 1.0,
) -> None:
    """Add ``parts`` in rank order, write the sum times ``wire_scale`` to ``payload``.

    The rounding error is added to the residual version that this step writes, in units
    of the sum. Raises ValueError for dtypes, spans or buffers out of range, and for a
    ``wire_scale`` that is not a power of two in 2^-126..1.
    """
    fmt, wire, rows = (
        format_of(dtype),
        format_of(wire_dtype, "wire_dtype"),
        span_rows(spans),
    )
    if not 2.0**-126 <= wire_scale <= 1 or math.frexp(wire_scale)[0] != 0.5:
        raise ValueError(
            f"wire_scale must be a power of two in 2^-126..1, got {wire_scale}"
        )
    sources = parts_of(parts)
    target = buffer_of("payload", payload, writable=True)
    nbytes = partial(cast_body_nbytes, wire_dtype=wire_dtype)
    for rank, source in enumerate(sources):
        check_bodies(f"parts[{rank}]", source, rows, nbytes)
    check_bodies("payload", target, rows, nbytes)
    feedback = Residual(residual, rows)
    factor = fmt.compute.type(wire_scale)
    for row in rows:
        length, body = int(row["length"]), int(row["body"])
        acc = load(sources[0], body, length, wire, fmt.compute)
        for source in sources[1:]:
            acc = acc + load(source, body, length, wire, fmt.compute)
        acc = acc * factor
        sent = to_compute(store(target, body, acc, wire), wire, fmt.compute)
        if feedback.present:
            feedback.add(row, (acc - sent) / factor, np.isfinite(sent))
