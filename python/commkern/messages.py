"""A bucket's messages: what each holds, and where it lies in the buffer of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from commkern.layout import Group, section_spans, shifted
from commkern.spans import SpanTable, span_table
from commkern.wire import message as wire
from commkern.wire.crc import hash_text
from commkern.wire.dtypes import CODES, NBYTES
from commkern.wire.message import align

Row = dict[str, int]


class Kept(NamedTuple):
    """A span that stays in the data buffer, and the written bytes of its message before
    it (up to ``before``) and behind it (from ``behind`` on)."""

    before: int
    behind: int
    nbytes: int
    row: Row


@dataclass(frozen=True)
class Message:
    """One owner's message of one stage and segment.

    ``begin`` counts bytes in the buffer of all messages, where ``nbytes`` are taken by
    what is written: all but the spans that stay in the data buffer (``kept``). ``rows``
    holds the spans of every section by the number of its group, their bodies from the
    message's start. Where the whole message must have a place (``nbytes_in_all``), kept
    spans lie behind what is written.
    """

    begin: int
    nbytes: int
    nbytes_in_all: int
    header: bytes
    rows: dict[int, tuple[Row, ...]]
    kept: tuple[Kept, ...]

    @property
    def end(self) -> int:
        """Where it ends in the buffer of all messages."""
        return self.begin + self.nbytes


class Messages:
    """Every message, one behind the other, by stage, segment and owner.

    All groups have a section in the messages of the first stage, those whose
    compressor has more stages also in the messages of these.
    """

    def __init__(
        self, groups: Sequence[Group], dtype: str, world_size: int, segments: int
    ) -> None:
        self._groups = groups
        self._dtype = dtype
        self._cut = world_size, segments
        self.stages = max((group.compressor.stages for group in groups), default=1)
        self.nbytes = 0
        self._placed: dict[tuple[int, int, int], Message] = {}
        for place in product(range(self.stages), range(segments), range(world_size)):
            self._placed[place] = self._lay_out(*place, begin=align(self.nbytes, 64))
            self.nbytes = self._placed[place].end

    def __getitem__(self, place: tuple[int, int, int]) -> Message:
        """The message of (stage, segment, owner)."""
        return self._placed[place]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._placed.values())

    def spans(
        self, stage: int, segment: int, number: int, owners: Sequence[int]
    ) -> SpanTable:
        """These owners' spans of one group, over the buffer of all messages."""
        rows: list[Row] = []
        for owner in owners:
            message = self._placed[stage, segment, owner]
            rows += shifted(message.rows.get(number, ()), message.begin)
        return span_table(rows)

    def _lay_out(self, stage: int, segment: int, owner: int, begin: int) -> Message:
        parameters = sum(len(group.members) for group in self._groups)
        listed = [
            (number, group)
            for number, group in enumerate(self._groups)
            if group.compressor.stages > stage
        ]
        end = wire.header_nbytes(len(listed), parameters)
        rows, entries = {}, []
        written = _Written(self._dtype)
        world_size, segments = self._cut
        for number, group in listed:
            spans = section_spans(
                group, self._dtype, owner, world_size, segment, segments, stage
            )
            offset = align(end, 8)
            end = offset + spans.nbytes
            placed = shifted(spans.rows, offset)
            if stage > 0:
                placed = self._continued(placed, (stage - 1, segment, owner), number)
            rows[number] = tuple(written.place(group, placed))
            entries.append(self._section(group, offset, spans.nbytes))
        header = wire.pack_header(
            entries, parameter_count=parameters, message_nbytes=end
        )
        nbytes = end - written.left_out
        in_all = written.place_kept(align(nbytes, 64))
        return Message(begin, nbytes, in_all, header, rows, tuple(written.kept))

    def _continued(
        self, rows: list[Row], place: tuple[int, int, int], number: int
    ) -> list[Row]:
        """The rows, told where the stage before has the same spans."""
        before = self._placed[place]
        earlier = shifted(before.rows[number], before.begin)
        return [
            row | {"earlier": old["body"]}
            for row, old in zip(rows, earlier, strict=True)
        ]

    def _section(self, group: Group, offset: int, nbytes: int) -> wire.Section:
        return wire.Section(
            first_parameter=group.first,
            parameter_count=len(group.members),
            compressor=hash_text(str(group.compressor)),
            dtype=CODES[self._dtype],
            offset=offset,
            nbytes=nbytes,
        )


class _Written:
    """Leaves those spans of a message out that stay in the data buffer."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.left_out = 0  # bytes; a multiple of 8, so that alignments hold
        self.kept: list[Kept] = []

    def place(self, group: Group, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows of a section with their bodies as they are written."""
        for row in rows:
            placed = row | {"body": row["body"] - self.left_out}
            if group.stays(row["length"], self._dtype):
                nbytes = row["length"] * NBYTES[self._dtype]
                self.left_out += nbytes // 8 * 8
                behind = row["body"] + nbytes - self.left_out
                self.kept.append(Kept(placed["body"], behind, nbytes, placed))
            yield placed

    def place_kept(self, begin: int) -> int:
        """Bodies for what was left out, from ``begin`` on; where they end."""
        for kept in self.kept:
            kept.row["body"] = begin
            begin = align(begin + kept.nbytes, 64)
        return begin
