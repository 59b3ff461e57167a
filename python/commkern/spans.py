"""The span table: which elements of a flat buffer a kernel works on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

# Mirrors ``struct Span`` of csrc/core/types.h.
SPAN = np.dtype(
    [
        ("offset", np.int64),
        ("length", np.int64),
        ("begin", np.int64),
        ("body", np.int64),
        ("earlier", np.int64),
        ("residual", np.int64),
        ("parameter_id", np.uint32),
        ("parameter", np.uint32),
    ]
)

SpanTable = npt.NDArray[np.void]


def span_table(rows: Iterable[dict[str, int]]) -> SpanTable:
    """Build a table; fields that a row does not name are 0.

    >>> span_table([{"length": 4}, {"offset": 4, "length": 2}])["offset"].tolist()
    [0, 4]
    """
    listed = list(rows)
    table = np.zeros(len(listed), dtype=SPAN)
    for index, row in enumerate(listed):
        for name, value in row.items():
            table[index][name] = value
    return table


def one_span(length: int, **fields: int) -> SpanTable:
    """The table of a single tensor of ``length`` elements."""
    return span_table([{"length": length, **fields}])
