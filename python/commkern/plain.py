"""Plain sections: elements that travel as they are.

Their owner sums what arrives and divides for the average, so that it sends the result
itself. Long spans stay in the data buffer: they are sent from there, summed there, and
received there, as pieces of their own between those of the message that are written.

An owner's sum can only arrive once this rank's elements have left, so both may share
their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commkern.compressors.base import KernelCall
from commkern.layout import Group
from commkern.messages import Message, Row
from commkern.plan import Slice
from commkern.spans import SpanTable, one_span, span_table
from commkern.wire.dtypes import NBYTES


def written(group: Group, spans: SpanTable, dtype: str) -> SpanTable:
    """The spans that are written to messages: all but those that stay in the data
    buffer."""
    moved = [not group.stays(int(row["length"]), dtype) for row in spans]
    listed: SpanTable = spans[np.array(moved, dtype=bool)]
    return listed


def pieces(
    place: Slice, message: Message, dtype: str, *, staged: bool
) -> tuple[Slice, ...]:
    """The message at ``place`` as both ends cut it.

    All of it is there where it is ``staged``; else long spans are in the data buffer.
    """
    cut, at = [], 0
    for before, behind, nbytes, row in message.kept:
        cut.append(Slice(place.buffer, place.offset + at, before - at))
        here = Slice(place.buffer, place.offset + row["body"], nbytes)
        own = Slice("data", row["offset"] * NBYTES[dtype], nbytes)
        cut.append(here if staged else own)
        at = behind
    cut.append(Slice(place.buffer, place.offset + at, message.nbytes - at))
    return tuple(piece for piece in cut if piece.nbytes)


def sum_calls(
    group: Group,
    rows: Sequence[Row],
    parts: Sequence[Slice],
    result: Slice,
    *,
    own: int,
    **fields: Any,
) -> list[KernelCall]:
    """The owner's step: ``rows`` of the messages in ``parts``, of which it sent number
    ``own``, to ``result`` or, where they stay there, to the data buffer.

    ``fields`` are the dtype, the scale and where to flag values that are not finite.
    """
    size = NBYTES[fields["dtype"]]
    moved = [row for row in rows if not group.stays(row["length"], fields["dtype"])]
    spans = span_table(
        {"offset": row["body"] // size, "length": row["length"]} for row in moved
    )
    operands = {"spans": spans, "parts": list(parts), "output": result}
    calls = [KernelCall("sum", fields | operands)] if moved else []
    staying = [row for row in rows if group.stays(row["length"], fields["dtype"])]
    return calls + [_sum_in_place(row, parts, own, fields, size) for row in staying]


def result_calls(
    group: Group,
    spans: SpanTable,
    payload: Slice,
    output: Slice,
    *,
    dtype: str,
    nonfinite: Slice,
) -> list[KernelCall]:
    """What owners made of ``spans``, to the data buffer where it is not there yet.

    What is there already has been looked at by its owner for values not finite.
    """
    listed = written(group, spans, dtype)
    copied = {"payload": payload, "output": output, "nonfinite": nonfinite}
    types = {"dtype": dtype, "wire_dtype": dtype}
    fields = {"spans": listed} | copied | types
    return [KernelCall("uncast", fields)] if len(listed) else []


def _sum_in_place(
    row: Row, parts: Sequence[Slice], own: int, fields: dict[str, Any], size: int
) -> KernelCall:
    nbytes = row["length"] * size
    here = Slice("data", row["offset"] * size, nbytes)
    bodies = [Slice(p.buffer, p.offset + row["body"], nbytes) for p in parts]
    bodies[own] = here
    operands = {"spans": one_span(row["length"]), "parts": bodies, "output": here}
    return KernelCall("sum", fields | operands)
