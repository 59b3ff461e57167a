"""A plan: everything one rank does for one bucket, as data.

A plan is built once for a bucket layout and the settings in force (``compose``), can be
printed, and is run by ``runner`` any number of times. Steps refer to named byte buffers
by slices and to run-time scalars by registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from commkern.compressors.base import KernelCall
from commkern.layout import Member
from commkern.wire.preamble import NBYTES as PREAMBLE_NBYTES

#: Buffers that the caller owns; all others are workspace.
EXTERNAL = (
    "data",
    *("residual0", "residual1", "committed"),
    *("estimate0", "estimate1", "estimate_committed"),
)
#: Workspace that must be zero before a run.
FLAGS = ("touched", "nonfinite")
REGISTERS = ("seed", "step")
#: What the time of kernels and headers is accounted to.
PURPOSES = ("other", "compress", "reduce", "decompress")


class Slice(NamedTuple):
    """A byte range of a named buffer."""

    buffer: str
    offset: int
    nbytes: int


class Register(NamedTuple):
    """A scalar that is known when the plan runs."""

    name: str


class WriteHeader(NamedTuple):
    """Write the message's header, its step and parameter bits filled in.

    Its non-finite flag says whether a byte of ``nonfinite`` is set; without, it is the
    template's.
    """

    message: Slice
    template: bytes
    touched: Slice
    nonfinite: Slice | None = None


class ReadHeader(NamedTuple):
    """Check a received header; add its parameter bits and its flag to ours."""

    message: Slice
    template: bytes
    touched: Slice
    sender: int
    nonfinite: Slice | None = None


class Post(NamedTuple):
    """Start the transfers of a round."""

    round: int


class Complete(NamedTuple):
    """Wait for the transfers of a round."""

    round: int


class Begin(NamedTuple):
    """The kernels and headers from here on are for one of ``PURPOSES``."""

    purpose: str


class Transfer(NamedTuple):
    """One message of an exchange, in pieces that follow each other on the wire.

    Both ends cut it at the same places. Pieces of "data" are sent from there.
    """

    peer: int
    pieces: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return sum(piece.nbytes for piece in self.pieces)


class Exchange(NamedTuple):
    """The messages of one round."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Step = KernelCall | WriteHeader | ReadHeader | Post | Complete | Begin


@dataclass(frozen=True, eq=False)
class Plan:
    """What a rank does for one bucket.

    ``members`` are in the order of the messages' parameters, ``exchanges`` in the order
    in which they are posted. ``description`` holds the texts behind the preamble's
    hashes, which explain a mismatch between ranks.
    """

    rank: int
    world_size: int
    dtype: str
    members: tuple[Member, ...]
    buffers: dict[str, int]
    preamble: bytes
    description: dict[str, str]
    exchanges: tuple[Exchange, ...]
    steps: tuple[Step, ...]
    bytes_dense: int
    """Bytes that this rank would send without compression and headers."""

    @property
    def bytes_sent(self) -> int:
        """Message bytes that this rank sends in one run, headers included."""
        return sum(t.nbytes for e in self.exchanges for t in e.sends)

    @cached_property
    def writers(self) -> frozenset[int]:
        """Peers whose messages are received where they belong in "data"."""
        received = (transfer for e in self.exchanges for transfer in e.receives)
        buffers = ((peer, p.buffer) for peer, pieces in received for p in pieces)
        return frozenset(peer for peer, buffer in buffers if buffer == "data")

    def preamble_place(self, buffer: str, number: int, peer: int) -> Slice:
        """Where one of the three buffers of preambles holds a round's and peer's."""
        at = (number * self.world_size + peer) * PREAMBLE_NBYTES
        return Slice(buffer, at, PREAMBLE_NBYTES)

    @cached_property
    def residual_rows(self) -> Any:
        """The members' rows in the table of residuals, -1 without feedback."""
        return np.array(
            [-1 if m.residual is None else m.row for m in self.members], dtype=np.int64
        )

    def __str__(self) -> str:
        lines = [f"plan of rank {self.rank} of {self.world_size}, {self.dtype}"]
        lines += [
            f"  buffer {name}: {size} bytes" for name, size in self.buffers.items()
        ]
        lines += [f"  {_step_text(step, self)}" for step in self.steps]
        return "\n".join(lines)


def _slice_text(piece: Slice) -> str:
    return f"{piece.buffer}[{piece.offset}:{piece.offset + piece.nbytes}]"


def _transfers_text(listed: tuple[Transfer, ...], word: str) -> str:
    texts = (f"{'+'.join(map(_slice_text, t.pieces))} {word} {t.peer}" for t in listed)
    return ", ".join(texts) or "nothing"


def _step_text(step: Step, plan: Plan) -> str:
    if isinstance(step, KernelCall):
        fields = ", ".join(f"{k}={_field_text(v)}" for k, v in step.fields.items())
        return f"{step.name}({fields})"
    if isinstance(step, Post):
        sends = plan.exchanges[step.round].sends
        return f"post round {step.round}: {_transfers_text(sends, 'to')}"
    if isinstance(step, Complete):
        receives = plan.exchanges[step.round].receives
        return f"complete round {step.round}: {_transfers_text(receives, 'from')}"
    if isinstance(step, Begin):
        return f"{step.purpose}:"
    verb = "write" if isinstance(step, WriteHeader) else "read"
    return f"{verb} header of {_slice_text(step.message)}"


def _field_text(value: Any) -> str:
    if isinstance(value, Slice):
        return _slice_text(value)
    if isinstance(value, Register):
        return f"${value.name}"
    if isinstance(value, np.ndarray):
        return f"<{len(value)} spans>"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_field_text(item) for item in value)}]"
    return str(value)


def lower(plan: Plan) -> dict[str, Any]:
    """The plan with buffers and registers as numbers: the form that is compiled."""
    index = {name: number for number, name in enumerate(plan.buffers)}

    def piece(part: Slice) -> tuple[int, int, int]:
        return index[part.buffer], part.offset, part.nbytes

    def operand(name: str, value: Any) -> Any:
        if isinstance(value, Slice):
            return ("slice", *piece(value))
        if isinstance(value, Register):
            return ("register", REGISTERS.index(value.name))
        if name == "parts":
            return ("parts", [piece(part) for part in value])
        if name == "residual" and value is not None:
            return ("residual", *(piece(part) for part in value))
        return value

    def header_place(item: WriteHeader | ReadHeader) -> tuple[Any, ...]:
        flag = None if item.nonfinite is None else piece(item.nonfinite)
        return piece(item.message), item.template, piece(item.touched), flag

    def step(item: Step) -> tuple[Any, ...]:
        if isinstance(item, KernelCall):
            fields = {k: operand(k, v) for k, v in item.fields.items()}
            return ("kernel", item.name, fields)
        if isinstance(item, WriteHeader):
            return ("write_header", *header_place(item))
        if isinstance(item, ReadHeader):
            return ("read_header", *header_place(item), item.sender)
        if isinstance(item, Begin):
            return ("begin", item.purpose)
        return ("post" if isinstance(item, Post) else "complete", item.round)

    def transfers(
        items: tuple[Transfer, ...],
    ) -> list[tuple[int, list[tuple[int, int, int]]]]:
        return [(peer, [piece(part) for part in pieces]) for peer, pieces in items]

    return {
        "buffers": list(plan.buffers),
        "registers": list(REGISTERS),
        "rank": plan.rank,
        "world_size": plan.world_size,
        "preamble": plan.preamble,
        "rounds": [(transfers(e.sends), transfers(e.receives)) for e in plan.exchanges],
        "steps": [step(item) for item in plan.steps],
    }
