"""Twin of csrc/kernels/feedback.h; its comments are the contracts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from commkern.reference.layout import (
    Kernel,
    Residual,
    buffer_of,
    check_elements,
    check_per_row,
    format_of,
    load,
    span_rows,
    store,
)
from commkern.reference.numerics import FORMATS, to_compute
from commkern.spans import SpanTable


@Kernel
def residual_subtract(
    *, spans: SpanTable, input: Any, dtype: str, residual: Any = None
) -> None:
    """Subtract ``input`` from the residual version that this step writes.

    Elements whose difference is not finite stay. Raises ValueError for dtypes, spans or
    buffers out of range, and without a residual.
    """
    fmt, rows = format_of(dtype), span_rows(spans)
    source = buffer_of("input", input)
    check_elements("input", source, rows, fmt.nbytes)
    held = _present(residual, rows)
    for row in rows:
        start, length = int(row["offset"]) * fmt.nbytes, int(row["length"])
        values = load(source, start, length, fmt, fmt.compute)
        held.revise(row, held.written(row).astype(fmt.compute) - values)


@Kernel
def residual_scale(
    *, spans: SpanTable, residual: Any = None, factor: float = 1.0
) -> None:
    """Multiply the residual version that this step writes by ``factor``, in fp32.

    Elements whose product is not finite stay. Raises ValueError for spans or buffers
    out of range, without a residual and for a ``factor`` that is not finite.
    """
    rows = span_rows(spans)
    held = _present(residual, rows)
    if not math.isfinite(factor):
        raise ValueError(f"factor must be a finite number, got {factor}")
    for row in rows:
        held.revise(row, held.written(row) * np.float32(factor))


@Kernel
def accumulate(
    *,
    spans: SpanTable,
    input: Any,
    output: Any,
    dtype: str,
    residual: Any = None,
    nonfinite: Any = None,
) -> None:
    """Add ``input`` (elements of the compute type) to a running sum, kept in two
    versions like a residual, and write the new sum to ``output``.

    ``nonfinite`` (uint8, one a span) becomes 1 where a written value is not finite; the
    running sum keeps such elements. Raises ValueError for dtypes, spans or buffers out
    of range, and without a running sum.
    """
    fmt, rows = format_of(dtype), span_rows(spans)
    wide = FORMATS["float64" if dtype == "float64" else "float32"]
    source = buffer_of("input", input)
    target = buffer_of("output", output, writable=True)
    flags = buffer_of("nonfinite", nonfinite, writable=True)
    check_elements("input", source, rows, wide.nbytes)
    check_elements("output", target, rows, fmt.nbytes)
    held = _present(residual, rows)
    if nonfinite is not None:
        check_per_row("nonfinite", flags, rows, 1)
    for index, row in enumerate(rows):
        start, length = int(row["offset"]), int(row["length"])
        values = load(source, start * wide.nbytes, length, wide, fmt.compute)
        total = held.read(row).astype(fmt.compute) + values
        held.write(row, total)
        stored = store(target, start * fmt.nbytes, total, fmt)
        finite = np.isfinite(to_compute(stored, fmt, fmt.compute)).all()
        if nonfinite is not None and not finite:
            flags[index] = 1


def _present(residual: Any, rows: list[Any]) -> Residual:
    held = Residual(residual, rows)
    if not held.present and rows:
        raise ValueError("residual must be two versions, got None")
    return held
