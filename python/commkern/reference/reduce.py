"""Twin of csrc/kernels/reduce.h; its comments are the contracts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commkern.reference.layout import (
    Kernel,
    buffer_of,
    check_elements,
    check_per_row,
    format_of,
    load,
    parts_of,
    span_rows,
    store,
)
from commkern.reference.numerics import Floats, largest_magnitude
from commkern.spans import SpanTable


@Kernel
def sum(
    *,
    spans: SpanTable,
    parts: Sequence[Any],
    output: Any,
    dtype: str,
    scale: float = 1.0,
    nonfinite: Any = None,
) -> None:
    """Write the sum of ``parts`` (``dtype`` elements), in rank order, times ``scale``.

    Sets ``nonfinite[row]`` (uint8) to 1 where it wrote a NaN or an Inf.
    Raises ValueError for dtypes, spans or buffers out of range.
    """
    fmt, rows = format_of(dtype), span_rows(spans)
    sources, target = parts_of(parts), buffer_of("output", output, writable=True)
    for rank, source in enumerate(sources):
        check_elements(f"parts[{rank}]", source, rows, fmt.nbytes)
    check_elements("output", target, rows, fmt.nbytes)
    flags = buffer_of("nonfinite", nonfinite, writable=True)
    if nonfinite is not None:
        check_per_row("nonfinite", flags, rows, 1)
    factor = fmt.compute.type(scale)
    for index, row in enumerate(rows):
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        acc = load(sources[0], start, length, fmt, fmt.compute)
        for source in sources[1:]:
            acc = acc + load(source, start, length, fmt, fmt.compute)
        store(target, start, factor * acc, fmt)
        stored = load(target, start, length, fmt, fmt.compute)
        if nonfinite is not None and not np.isfinite(stored).all():
            flags[index] = 1


@Kernel
def absmax(*, spans: SpanTable, input: Any, dtype: str, output: Any) -> None:
    """Write the largest magnitude of every span to ``output`` (fp32; fp64 for fp64).

    Raises ValueError for dtypes, spans or buffers out of range.
    """
    fmt, rows = format_of(dtype), span_rows(spans)
    source, target = (
        buffer_of("input", input),
        buffer_of("output", output, writable=True),
    )
    check_elements("input", source, rows, fmt.nbytes)
    check_per_row("output", target, rows, fmt.compute.itemsize)
    results = np.zeros(len(rows), dtype=fmt.compute)
    for index, row in enumerate(rows):
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        values = load(source, start, length, fmt, fmt.compute)
        results[index] = largest_magnitude(values)
    target[: results.nbytes] = results.view(np.uint8)


def _flag(
    found: Callable[[Floats], Any], spans: SpanTable, input: Any, dtype: str, flags: Any
) -> None:
    fmt, rows = format_of(dtype), span_rows(spans)
    source, target = buffer_of("input", input), buffer_of("flags", flags, writable=True)
    check_elements("input", source, rows, fmt.nbytes)
    check_per_row("flags", target, rows, 1)
    for index, row in enumerate(rows):
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        if found(load(source, start, length, fmt, fmt.compute)).any():
            target[index] = 1


@Kernel
def nonfinite_check(*, spans: SpanTable, input: Any, dtype: str, flags: Any) -> None:
    """Set ``flags[row]`` (uint8) to 1 where the span holds a NaN or an Inf."""
    _flag(lambda values: ~np.isfinite(values), spans, input, dtype, flags)


@Kernel
def nonzero_check(*, spans: SpanTable, input: Any, dtype: str, flags: Any) -> None:
    """Set ``flags[row]`` (uint8) to 1 where the span holds anything but +0 and -0."""
    _flag(lambda values: values != 0, spans, input, dtype, flags)


@Kernel
def saturate(*, spans: SpanTable, data: Any, dtype: str, limit: float = 0.0) -> None:
    """In place: NaN becomes 0, magnitudes above ``limit`` become ``limit``.

    Raises ValueError for dtypes, spans or buffers out of range and for a ``limit`` that
    is negative or NaN.
    """
    fmt, rows = format_of(dtype), span_rows(spans)
    if not limit >= 0:
        raise ValueError(f"limit must be a number >= 0, got {limit}")
    raw = buffer_of("data", data, writable=True)
    check_elements("data", raw, rows, fmt.nbytes)
    bound = fmt.compute.type(limit)
    for row in rows:
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        values = load(raw, start, length, fmt, fmt.compute)
        values = np.where(np.isnan(values), fmt.compute.type(0), values)
        over = np.abs(values) > bound
        clipped = np.where(over, np.copysign(bound, values), values)
        store(raw, start, clipped, fmt)
