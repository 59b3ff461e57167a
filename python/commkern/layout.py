"""Who owns which elements, and where their coded form lies in a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commkern.compressors import Compressor, Identity
from commkern.compressors.base import Operands
from commkern.spans import SpanTable, span_table
from commkern.wire.crc import hash_text
from commkern.wire.dtypes import NBYTES
from commkern.wire.message import align

_IDENTITY = Identity()
#: Bytes from which on a plain span costs more to copy than to send on its own.
_WORTH_A_PIECE = 1 << 18


@dataclass(frozen=True)
class Member:
    """One parameter of a bucket.

    ``offset`` is its first element in the data buffer, ``residual`` its first element
    in the residual buffers (None: no error feedback), ``row`` its row in the table of
    committed versions. ``flush`` sends what was held back before, uncompressed.
    """

    name: str
    numel: int
    offset: int
    compressor: Compressor
    residual: int | None = None
    row: int = 0
    flush: bool = False

    @property
    def parameter_id(self) -> int:
        """Keys the random draws and the first owner: CRC-32C of the name."""
        return hash_text(self.name)


def check_names(members: Sequence[Member]) -> None:
    """ValueError for two parameters whose names collide in CRC-32C."""
    seen: dict[int, str] = {}
    for member in members:
        other = seen.setdefault(member.parameter_id, member.name)
        if other != member.name:
            raise ValueError(
                f"parameters {other!r} and {member.name!r} have the same CRC-32C "
                f"{member.parameter_id:#010x}; rename one of them"
            )


def effective(member: Member, dtype: str) -> Member:
    """The member itself, or without compression where that would not be smaller."""
    coder = member.compressor
    if member.flush:
        return member
    coded = align(coder.body_nbytes(member.numel, dtype), coder.alignment(dtype))
    if coded < _IDENTITY.body_nbytes(member.numel, dtype):
        return member
    return Member(member.name, member.numel, member.offset, _IDENTITY)


@dataclass(frozen=True)
class Group:
    """Members that share a compressor: one section of every message."""

    compressor: Compressor
    feedback: bool
    first: int
    members: tuple[Member, ...]

    @property
    def is_plain(self) -> bool:
        """Whether nothing is coded and nothing held back."""
        return self.compressor.is_plain and not self.feedback

    def stays(self, length: int, dtype: str) -> bool:
        """Whether a span of so many elements is sent and summed where it lies."""
        return self.is_plain and length * NBYTES[dtype] >= _WORTH_A_PIECE


def group_members(members: Sequence[Member], dtype: str) -> tuple[Group, ...]:
    """Group members by compressor, in order of first appearance."""
    gathered: dict[tuple[Compressor, bool], list[Member]] = {}
    for member in members:
        used = effective(member, dtype)
        key = used.compressor, used.residual is not None
        gathered.setdefault(key, []).append(used)
    groups, first = [], 0
    for (compressor, feedback), listed in gathered.items():
        groups.append(Group(compressor, feedback, first, tuple(listed)))
        first += len(listed)
    return tuple(groups)


def chunk_bounds(
    numel: int, granule: int, parts: int, part: int, rotation: int = 0
) -> tuple[int, int]:
    """Elements [begin, end) of one part of a parameter cut at multiples of ``granule``.

    A function of the parameter alone: ``rotation`` (its id) spreads the parts of small
    parameters over the ranks.

    >>> [chunk_bounds(10, 4, 2, part) for part in (0, 1)]
    [(0, 4), (4, 10)]
    """
    blocks = -(-numel // granule)
    position = (part - rotation) % parts
    begin = blocks * position // parts * granule
    end = blocks * (position + 1) // parts * granule
    return min(begin, numel), min(end, numel)


@dataclass(frozen=True)
class SectionSpans:
    """A group's spans in one message, ``body`` relative to the section's start."""

    group: Group
    rows: tuple[dict[str, int], ...]
    nbytes: int


def section_spans(
    group: Group,
    dtype: str,
    owner: int,
    world_size: int,
    segment: int = 0,
    segments: int = 1,
    stage: int = 0,
) -> SectionSpans:
    """The spans of a group that ``owner`` owns in this segment, laid out for a stage.

    The spans are the same in every stage, their bodies are not.
    """
    coder = group.compressor
    rows, body = [], 0
    for member, begin, end in _pieces(
        group, dtype, owner, world_size, segment, segments
    ):
        body = align(body, coder.alignment(dtype))
        rows.append(
            {
                "offset": member.offset + begin,
                "length": end - begin,
                "begin": begin,
                "body": body,
                "residual": (member.residual or 0) + begin,
                "parameter_id": member.parameter_id,
                "parameter": member.row,
            }
        )
        body += coder.stage_nbytes(stage, end - begin, dtype)
    return SectionSpans(group, tuple(rows), body)


def _pieces(
    group: Group, dtype: str, owner: int, world_size: int, segment: int, segments: int
) -> Iterator[tuple[Member, int, int]]:
    granule = group.compressor.granule(dtype)
    whole_shares = group.compressor.whole_shares
    for member in group.members:
        first, last = chunk_bounds(
            member.numel, granule, world_size, owner, member.parameter_id
        )
        if whole_shares:
            mine = segment == member.parameter_id % segments
            begin, end = 0, (last - first) * mine
        else:
            begin, end = chunk_bounds(last - first, granule, segments, segment)
        if begin < end:
            yield member, first + begin, first + end


def shifted(rows: Sequence[dict[str, int]], base: int) -> list[dict[str, int]]:
    """The rows with their bodies ``base`` bytes further on."""
    return [row | {"body": row["body"] + base} for row in rows]


def stages_of(coder: Compressor, on: Operands, payload: Any) -> list[Operands]:
    """``on`` for each stage of whole tensors, as at world size 1.

    ``on.spans`` holds a row for each tensor, and ``body`` says where in ``payload`` the
    coded form of all its stages begins.
    """
    staged: list[Operands] = []
    for stage in range(coder.stages):
        spans = on.spans.copy()
        for row in spans:
            row["body"] += coder.stage_begin(stage, int(row["length"]), on.dtype)
        if staged:
            spans["earlier"] = staged[-1].spans["body"]
        earlier = payload if staged else None
        staged.append(replace(on, spans=spans, stage=stage, earlier=earlier))
    return staged


def dense_spans(groups: Sequence[Group]) -> SpanTable:
    """One row a parameter, in message order, over the data buffer."""
    return span_table(
        {"offset": member.offset, "length": member.numel}
        for group in groups
        for member in group.members
    )
