"""Compose a plan: compressors, feedback and a schedule flattened for one bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from commkern.compressors.base import WHO_REDUCED, KernelCall, Operands
from commkern.layout import (
    Group,
    Member,
    SectionSpans,
    dense_spans,
    group_members,
    section_spans,
    shifted,
)
from commkern.plan import (
    Complete,
    Exchange,
    Plan,
    Post,
    ReadHeader,
    Register,
    Slice,
    Step,
    Transfer,
    WriteHeader,
)
from commkern.schedules import Round, resolve
from commkern.spans import SpanTable, span_table
from commkern.wire import message as wire_message
from commkern.wire import preamble as wire_preamble
from commkern.wire.crc import hash_text
from commkern.wire.dtypes import CODES, NBYTES
from commkern.wire.message import align

NONFINITE = ("propagate", "raise", "saturate")
_MAX_FINITE = {
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}


@dataclass(frozen=True)
class Settings:
    """What the ranks must agree on besides the parameters and their compressors."""

    op: str = "sum"
    algorithm: str = "auto"
    nonfinite: str = "propagate"
    feedback: str = "None"
    rollback: bool = True
    deterministic: bool = False
    seed: int = 0
    segments: int = 1

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in vars(self).items())


@dataclass(frozen=True)
class _Message:
    """A chunk's message: its place in the buffer of all messages and its sections."""

    begin: int
    nbytes: int
    header: bytes
    sections: tuple[tuple[SectionSpans, int], ...]  # with offset in the message

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def compose(
    members: Sequence[Member],
    dtype: str,
    *,
    rank: int,
    world_size: int,
    settings: Settings,
) -> Plan:
    """Build the plan of ``rank`` for a bucket of ``members`` of one dtype.

    Raises ValueError for an algorithm that a member's compressor does not allow and for
    two parameters whose names collide in CRC-32C.
    """
    _check_names(members)
    schedules = {
        resolve(settings.algorithm, m.compressor.aggregation) for m in members
    } or {resolve(settings.algorithm, "hop")}
    ((_, schedule),) = schedules
    groups = group_members(members, dtype)
    return _Composer(groups, dtype, rank, world_size, settings).build(
        schedule(world_size, rank)
    )


def _check_names(members: Sequence[Member]) -> None:
    seen: dict[int, str] = {}
    for member in members:
        other = seen.setdefault(member.parameter_id, member.name)
        if other != member.name:
            raise ValueError(
                f"parameters {other!r} and {member.name!r} have the same CRC-32C "
                f"{member.parameter_id:#010x}; rename one of them"
            )


@dataclass
class _Composer:
    groups: tuple[Group, ...]
    dtype: str
    rank: int
    world_size: int
    settings: Settings
    buffers: dict[str, int] = field(default_factory=dict)

    def build(self, rounds: tuple[Round, ...]) -> Plan:
        reduce_round, gather_round = rounds
        self._messages = self._lay_out()
        self._declare_buffers()
        count = self.settings.segments
        segments = range(count)
        exchanges = [self._reduce_exchange(reduce_round, s) for s in segments]
        exchanges += [self._gather_exchange(gather_round, s) for s in segments]
        mine = [self.rank]
        others = [owner for owner in range(self.world_size) if owner != self.rank]
        # What others wait for comes first; what only this rank needs passes the time
        # while messages travel.
        steps = self._prepare()
        for segment in segments:
            steps += [*self._compress(segment, others), Post(segment)]
        for segment in segments:
            steps += self._compress(segment, mine)
        for segment in segments:
            steps += [Complete(segment), *self._reduce(segment), Post(count + segment)]
            steps += self._decompress(segment, mine)
        for segment in segments:
            steps += [Complete(count + segment), *self._decompress(segment, others)]
        description = self._description()
        return Plan(
            rank=self.rank,
            world_size=self.world_size,
            dtype=self.dtype,
            members=tuple(m for group in self.groups for m in group.members),
            buffers=self.buffers,
            preamble=self._preamble(description),
            description=description,
            exchanges=tuple(exchanges),
            steps=tuple(steps),
            bytes_dense=self._bytes_dense(rounds),
        )

    def _bytes_dense(self, rounds: tuple[Round, ...]) -> int:
        """What the sends of all rounds would take as plain elements."""
        owned = [0] * self.world_size
        for messages in self._messages:
            for owner, message in enumerate(messages):
                owned[owner] += sum(
                    row["length"] for spans, _ in message.sections for row in spans.rows
                )
        sent = sum(owned[t.chunk] for one in rounds for t in one.sends)
        return sent * NBYTES[self.dtype]

    # --- layout -------------------------------------------------------------------

    def _lay_out(self) -> list[list[_Message]]:
        """Messages by segment and owner, one behind the other."""
        begin, laid_out = 0, []
        for segment in range(self.settings.segments):
            messages = []
            for owner in range(self.world_size):
                message = self._message(owner, segment, begin)
                messages.append(message)
                begin = align(message.end, 64)
            laid_out.append(messages)
        return laid_out

    def _message(self, owner: int, segment: int, begin: int) -> _Message:
        listed = [
            section_spans(
                group,
                self.dtype,
                owner,
                self.world_size,
                segment,
                self.settings.segments,
            )
            for group in self.groups
        ]
        end = wire_message.header_nbytes(len(listed), self._parameter_count)
        sections, entries = [], []
        for spans in listed:
            offset = align(end, 8)
            end = offset + spans.nbytes
            sections.append((spans, offset))
            entries.append(
                wire_message.Section(
                    first_parameter=spans.group.first,
                    parameter_count=len(spans.group.members),
                    compressor=hash_text(str(spans.group.compressor)),
                    dtype=CODES[self.dtype],
                    offset=offset,
                    nbytes=spans.nbytes,
                )
            )
        header = wire_message.pack_header(
            entries, parameter_count=self._parameter_count, message_nbytes=end
        )
        return _Message(begin, end, header, tuple(sections))

    def _declare_buffers(self) -> None:
        members = [m for group in self.groups for m in group.members]
        fed = [m for m in members if m.residual is not None]
        residual = max(((m.residual or 0) + m.numel for m in fed), default=0)
        messages = [m for segment in self._messages for m in segment]
        mine = [segment[self.rank] for segment in self._messages]
        self._part_stride = align(sum(align(m.nbytes, 64) for m in mine), 64)
        rows = sum(len(spans.rows) for m in messages for spans, _ in m.sections)
        preambles = 2 * self.settings.segments * self.world_size * 64
        data = max((m.offset + m.numel for m in members), default=0)
        self.buffers = {
            "data": data * NBYTES[self.dtype],
            "residual0": residual * 4,
            "residual1": residual * 4,
            "committed": max((m.row + 1 for m in fed), default=0),
            "outgoing": messages[-1].end,
            "parts": self._part_stride * self.world_size,
            "result": messages[-1].end,
            "touched": len(members),
            "nonfinite": rows,
            "preambles_out": preambles,
            "preambles_in": preambles,
            "preambles_expected": preambles,
        }

    @property
    def _parameter_count(self) -> int:
        return sum(len(group.members) for group in self.groups)

    def _whole(self, buffer: str) -> Slice:
        return Slice(buffer, 0, self.buffers[buffer])

    def _place(self, buffer: str, message: _Message) -> Slice:
        return Slice(buffer, message.begin, message.nbytes)

    def _part(self, segment: int, sender: int) -> Slice:
        """Where the sender's message for this rank's chunk arrives (or was written)."""
        mine = self._messages[segment][self.rank]
        if sender == self.rank:
            return self._place("outgoing", mine)
        before = sum(
            align(earlier[self.rank].nbytes, 64) for earlier in self._messages[:segment]
        )
        return Slice("parts", sender * self._part_stride + before, mine.nbytes)

    def _reduce_exchange(self, one: Round, segment: int) -> Exchange:
        messages = self._messages[segment]
        sends = (
            Transfer(t.peer, self._place("outgoing", messages[t.chunk]))
            for t in one.sends
        )
        receives = (Transfer(t.peer, self._part(segment, t.peer)) for t in one.receives)
        return Exchange(tuple(sends), tuple(receives))

    def _gather_exchange(self, one: Round, segment: int) -> Exchange:
        messages = self._messages[segment]

        def transfers(listed: tuple[tuple[int, int], ...]) -> tuple[Transfer, ...]:
            return tuple(
                Transfer(peer, self._place("result", messages[chunk]))
                for peer, chunk in listed
            )

        return Exchange(transfers(one.sends), transfers(one.receives))

    # --- steps --------------------------------------------------------------------

    def _prepare(self) -> list[Step]:
        dense = {"spans": dense_spans(self.groups), "dtype": self.dtype}
        data = self._whole("data")
        touched = {"input": data, "flags": self._whole("touched")}
        steps: list[Step] = [KernelCall("nonzero_check", dense | touched)]
        if self.settings.nonfinite == "saturate":
            # Half of what would fit, so that no rounding of the sum overflows.
            limit = {
                "data": data,
                "limit": _MAX_FINITE[self.dtype] / (2 * self.world_size),
            }
            steps.append(KernelCall("saturate", dense | limit))
        return steps

    def _operands(self, group: Group, spans: SpanTable, who: int) -> Operands:
        residual = tuple(
            self._whole(name) for name in ("residual0", "residual1", "committed")
        )
        return Operands(
            spans=spans,
            dtype=self.dtype,
            seed=Register("seed"),
            step=Register("step"),
            who=who,
            residual=residual if group.feedback else None,
        )

    def _spans(self, segment: int, number: int, owners: Sequence[int]) -> SpanTable:
        """These owners' spans of one group, over the buffer of all messages."""
        rows: list[dict[str, int]] = []
        for owner in owners:
            message = self._messages[segment][owner]
            spans, offset = message.sections[number]
            rows += shifted(spans.rows, message.begin + offset)
        return span_table(rows)

    def _groups_with_spans(
        self, segment: int, owners: Sequence[int]
    ) -> Iterator[tuple[Group, SpanTable]]:
        for number, group in enumerate(self.groups):
            spans = self._spans(segment, number, owners)
            if len(spans):
                yield group, spans

    def _compress(self, segment: int, owners: Sequence[int]) -> list[Step]:
        steps: list[Step] = []
        for group, spans in self._groups_with_spans(segment, owners):
            steps += group.compressor.compress_calls(
                self._operands(group, spans, self.rank),
                self._whole("data"),
                self._whole("outgoing"),
            )
        for owner in owners:
            if owner != self.rank:
                message = self._messages[segment][owner]
                steps.append(self._write_header("outgoing", message))
        return steps

    def _reduce(self, segment: int) -> list[Step]:
        mine = self._messages[segment][self.rank]
        peers = [r for r in range(self.world_size) if r != self.rank]
        steps: list[Step] = [
            self._read_header(self._part(segment, sender), mine, sender)
            for sender in peers
        ]
        parts = [self._part(segment, sender) for sender in range(self.world_size)]
        for group, (spans, offset) in zip(self.groups, mine.sections, strict=True):
            if not spans.rows:
                continue
            table = span_table(shifted(spans.rows, offset))
            operands = self._operands(group, table, WHO_REDUCED)
            steps += group.compressor.reduce_calls(
                operands, parts, self._place("result", mine)
            )
        return [*steps, self._write_header("result", mine)]

    def _decompress(self, segment: int, owners: Sequence[int]) -> list[Step]:
        steps: list[Step] = []
        for owner in owners:
            if owner != self.rank:
                message = self._messages[segment][owner]
                place = self._place("result", message)
                steps.append(self._read_header(place, message, owner))
        scale = 1.0 / self.world_size if self.settings.op == "avg" else 1.0
        for group, spans in self._groups_with_spans(segment, owners):
            steps += group.compressor.decompress_calls(
                self._operands(group, spans, WHO_REDUCED),
                self._whole("result"),
                self._whole("data"),
                scale=scale,
                nonfinite=self._whole("nonfinite"),
                world_size=self.world_size,
            )
        return steps

    def _write_header(self, buffer: str, message: _Message) -> WriteHeader:
        place = self._place(buffer, message)
        return WriteHeader(place, message.header, self._whole("touched"))

    def _read_header(self, place: Slice, message: _Message, sender: int) -> ReadHeader:
        return ReadHeader(place, message.header, self._whole("touched"), sender)

    # --- agreement ----------------------------------------------------------------

    def _description(self) -> dict[str, str]:
        members = [m for group in self.groups for m in group.members]
        return {
            "compressor": ";".join(str(m.compressor) for m in members),
            "settings": str(self.settings),
            "parameter names": ";".join(m.name for m in members),
            "shapes": ";".join(str(m.numel) for m in members),
            "dtypes": self.dtype,
        }

    def _preamble(self, description: dict[str, str]) -> bytes:
        hashes = [hash_text(text) for text in description.values()]
        return wire_preamble.pack_template(*hashes, world_size=self.world_size)
