"""Compose a plan: compressors, feedback and a schedule flattened for one bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from commkern import plain
from commkern.agreement import describe, preamble_template
from commkern.compressors.base import WHO_REDUCED, KernelCall, Operands
from commkern.feedback import accumulated
from commkern.feedback import feedback as read_feedback
from commkern.layout import (
    Group,
    Member,
    check_names,
    dense_spans,
    group_members,
)
from commkern.messages import Message, Messages
from commkern.plan import (
    Begin,
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
from commkern.schedules import Transfer as Hop
from commkern.spans import SpanTable, span_table
from commkern.wire.dtypes import NBYTES
from commkern.wire.message import align

NONFINITE = ("propagate", "raise", "saturate")
_MAX_FINITE = {
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}


def saturation_limit(dtype: str, world_size: int) -> float:
    """What ``nonfinite="saturate"`` clips at: half of what would fit, so that no
    rounding of the sum overflows."""
    return _MAX_FINITE[dtype] / (2 * world_size)


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
    policy: str = ""

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in vars(self).items())


def compose(
    members: Sequence[Member],
    dtype: str,
    *,
    rank: int,
    world_size: int,
    settings: Settings,
) -> Plan:
    """Build the plan of ``rank`` for a bucket of ``members`` of one dtype.

    Raises ValueError for an algorithm or a world size that a member's compressor does
    not allow and for two parameters whose names collide in CRC-32C.
    """
    check_names(members)
    for coder in {member.compressor for member in members}:
        coder.check_world_size(world_size)
    schedules = {
        resolve(settings.algorithm, m.compressor.aggregation) for m in members
    } or {resolve(settings.algorithm, "hop")}
    ((_, schedule),) = schedules
    groups = group_members(members, dtype)
    return _Composer(groups, dtype, rank, world_size, settings).build(
        schedule(world_size, rank)
    )


@dataclass
class _Composer:
    groups: tuple[Group, ...]
    dtype: str
    rank: int
    world_size: int
    settings: Settings
    buffers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = self.settings.feedback
        self._feedback = None if named == "None" else read_feedback(named)
        self._accumulates = bool(self._feedback and self._feedback.accumulates)
        # Where running sums take what is decoded, in the compute type.
        short = self._accumulates and NBYTES[self.dtype] == 2
        self._decoded = "decoded" if short else "data"
        self._scale = 1.0 / self.world_size if self.settings.op == "avg" else 1.0

    def build(self, rounds: tuple[Round, ...]) -> Plan:
        reduce_round, gather_round = rounds
        self._messages = Messages(
            self.groups, self.dtype, self.world_size, self.settings.segments
        )
        self._declare_buffers()
        exchanges: list[Exchange] = []
        steps = self._prepare()
        segments = range(self.settings.segments)
        for stage in range(self._messages.stages):
            steps += self._stage(stage, len(exchanges))
            exchanges += [self._to_owners(reduce_round, stage, s) for s in segments]
            exchanges += [self._from_owners(gather_round, stage, s) for s in segments]
        members = tuple(m for group in self.groups for m in group.members)
        description = describe(members, self.settings, self.dtype)
        return Plan(
            rank=self.rank,
            world_size=self.world_size,
            dtype=self.dtype,
            members=members,
            buffers=self.buffers,
            preamble=preamble_template(description, self.world_size),
            description=description,
            exchanges=tuple(exchanges),
            steps=tuple(steps),
            bytes_dense=self._bytes_dense(rounds),
        )

    def _stage(self, stage: int, first_round: int) -> list[Step]:
        """One reduction of everything that takes part in this stage.

        What others wait for comes first; what only this rank needs passes the time
        while messages travel.
        """
        segments = range(self.settings.segments)
        first_gather = first_round + len(segments)
        mine = [self.rank]
        others = [owner for owner in range(self.world_size) if owner != self.rank]
        steps: list[Step] = []
        for segment in segments:
            steps += self._compress(stage, segment, others)
            steps.append(Post(first_round + segment))
        for segment in segments:
            steps += self._compress(stage, segment, mine)
            steps += self._settle(stage, segment, others)
        for segment in segments:
            steps += [Complete(first_round + segment), *self._reduce(stage, segment)]
            steps.append(Post(first_gather + segment))
            steps += self._settle(stage, segment, mine)
            steps += self._decompress(stage, segment, mine)
        for segment in segments:
            steps.append(Complete(first_gather + segment))
            steps += self._decompress(stage, segment, others)
        return steps

    def _bytes_dense(self, rounds: tuple[Round, ...]) -> int:
        """What the sends of all rounds would take as plain elements, in one stage."""
        owned = [0] * self.world_size
        for segment, owner in product(
            range(self.settings.segments), range(self.world_size)
        ):
            listed = self._messages[0, segment, owner].rows.values()
            owned[owner] += sum(row["length"] for rows in listed for row in rows)
        sent = sum(owned[t.chunk] for one in rounds for t in one.sends)
        return sent * NBYTES[self.dtype]

    # --- buffers ------------------------------------------------------------------

    def _declare_buffers(self) -> None:
        members = [m for group in self.groups for m in group.members]
        fed = [m for m in members if m.residual is not None]
        residual = max(((m.residual or 0) + m.numel for m in fed), default=0)
        rows = sum(len(rows) for m in self._messages for rows in m.rows.values())
        stages, segments = self._messages.stages, self.settings.segments
        preambles = 2 * stages * segments * self.world_size * 64
        data = max((m.offset + m.numel for m in members), default=0)
        self._place_parts(stages, segments)
        self.buffers = {
            "data": data * NBYTES[self.dtype],
            "residual0": residual * 4,
            "residual1": residual * 4,
            "committed": max((m.row + 1 for m in fed), default=0),
            "outgoing": self._messages.nbytes,
            "parts": self._part_stride * (self.world_size - 1),
            "result": self._messages.nbytes,
            "touched": len(members),
            "nonfinite": rows,
            "preambles_out": preambles,
            "preambles_in": preambles,
            "preambles_expected": preambles,
        }
        if self._accumulates:
            self.buffers |= {
                "estimate0": residual * 4,
                "estimate1": residual * 4,
                "estimate_committed": self.buffers["committed"],
            }
        if self._decoded == "decoded":
            self.buffers["decoded"] = data * 4

    def _place_parts(self, stages: int, segments: int) -> None:
        """Where each sender's messages for this rank's chunk arrive, from its own
        stretch of the buffer on."""
        self._part_begins: dict[tuple[int, int], int] = {}
        self._part_stride = 0
        for stage, segment in product(range(stages), range(segments)):
            self._part_begins[stage, segment] = self._part_stride
            nbytes = self._messages[stage, segment, self.rank].nbytes_in_all
            self._part_stride += align(nbytes, 64)

    def _whole(self, buffer: str) -> Slice:
        return Slice(buffer, 0, self.buffers[buffer])

    def _place(self, buffer: str, message: Message) -> Slice:
        return Slice(buffer, message.begin, message.nbytes)

    def _part(self, stage: int, segment: int, sender: int) -> Slice:
        """The sender's message for this rank's chunk, arrived or written here."""
        mine = self._messages[stage, segment, self.rank]
        if sender == self.rank:
            return self._place("outgoing", mine)
        slot = sender - (sender > self.rank)
        begin = slot * self._part_stride + self._part_begins[stage, segment]
        return Slice("parts", begin, mine.nbytes)

    def _to_owners(self, one: Round, stage: int, segment: int) -> Exchange:
        mine = self._messages[stage, segment, self.rank]
        sends, receives = [], []
        for peer, chunk in one.sends:
            message = self._messages[stage, segment, chunk]
            place = self._place("outgoing", message)
            sends.append(self._transfer(peer, place, message))
        for peer, _ in one.receives:
            place = self._part(stage, segment, peer)
            receives.append(self._transfer(peer, place, mine, staged=True))
        return Exchange(tuple(sends), tuple(receives))

    def _from_owners(self, one: Round, stage: int, segment: int) -> Exchange:
        def transfers(listed: Sequence[Hop]) -> tuple[Transfer, ...]:
            messages = [self._messages[stage, segment, chunk] for _, chunk in listed]
            return tuple(
                self._transfer(peer, self._place("result", message), message)
                for (peer, _), message in zip(listed, messages, strict=True)
            )

        return Exchange(transfers(one.sends), transfers(one.receives))

    def _transfer(
        self, peer: int, place: Slice, message: Message, *, staged: bool = False
    ) -> Transfer:
        cut = plain.pieces(place, message, self.dtype, staged=staged)
        return Transfer(peer, cut)

    # --- steps --------------------------------------------------------------------

    def _prepare(self) -> list[Step]:
        dense = {"spans": dense_spans(self.groups), "dtype": self.dtype}
        data = self._whole("data")
        touched = {"input": data, "flags": self._whole("touched")}
        steps: list[Step] = [
            Begin("compress"),
            KernelCall("nonzero_check", dense | touched),
        ]
        if self.settings.nonfinite == "saturate":
            limit = {
                "data": data,
                "limit": saturation_limit(self.dtype, self.world_size),
            }
            steps.append(KernelCall("saturate", dense | limit))
        return steps

    def _operands(
        self, group: Group, stage: int, spans: SpanTable, who: int
    ) -> Operands:
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
            world_size=self.world_size,
            stage=stage,
            earlier=self._whole("result") if stage > 0 else None,
        )

    def _groups_with_spans(
        self, stage: int, segment: int, owners: Sequence[int]
    ) -> Iterator[tuple[Group, SpanTable]]:
        for number, group in enumerate(self.groups):
            spans = self._messages.spans(stage, segment, number, owners)
            if len(spans):
                yield group, spans

    def _compress(self, stage: int, segment: int, owners: Sequence[int]) -> list[Step]:
        steps: list[Step] = [Begin("compress")]
        for group, spans in self._groups_with_spans(stage, segment, owners):
            spans = plain.written(group, spans, self.dtype)
            if not len(spans):
                continue
            steps += group.compressor.compress_calls(
                self._operands(group, stage, spans, self.rank),
                self._whole("data"),
                self._whole("outgoing"),
            )
        for owner in owners:
            if owner != self.rank:
                message = self._messages[stage, segment, owner]
                steps.append(self._write_header("outgoing", message))
        return steps

    def _reduce(self, stage: int, segment: int) -> list[Step]:
        mine = self._messages[stage, segment, self.rank]
        peers = [r for r in range(self.world_size) if r != self.rank]
        parts = [self._part(stage, segment, r) for r in range(self.world_size)]
        steps: list[Step] = [Begin("reduce")]
        steps += [self._read_header(parts[sender], mine, sender) for sender in peers]
        result = self._place("result", mine)
        for number, rows in mine.rows.items():
            group = self.groups[number]
            if group.is_plain:
                steps += plain.sum_calls(
                    *(group, rows, parts, result),
                    own=self.rank,
                    dtype=self.dtype,
                    scale=self._scale,
                    nonfinite=self._whole("nonfinite"),
                )
            else:
                operands = self._operands(group, stage, span_table(rows), WHO_REDUCED)
                steps += group.compressor.reduce_calls(operands, parts, result)
        return [*steps, self._write_header("result", mine)]

    def _decompress(
        self, stage: int, segment: int, owners: Sequence[int]
    ) -> list[Step]:
        """Read what the owners reduced, and decode what is in its last stage."""
        steps: list[Step] = [Begin("decompress")]
        for owner in owners:
            if owner != self.rank:
                message = self._messages[stage, segment, owner]
                place = self._place("result", message)
                steps.append(self._read_header(place, message, owner))
        for group, spans in self._groups_with_spans(stage, segment, owners):
            if group.compressor.stages > stage + 1:
                continue
            nonfinite = self._whole("nonfinite")
            if group.is_plain:
                steps += plain.result_calls(
                    *(group, spans, self._whole("result"), self._whole("data")),
                    dtype=self.dtype,
                    nonfinite=nonfinite,
                )
                continue
            adds = self._accumulates and group.feedback
            calls = group.compressor.decompress_calls(
                self._operands(group, stage, spans, WHO_REDUCED),
                self._whole("result"),
                self._whole(self._decoded if adds else "data"),
                scale=self._scale,
                nonfinite=nonfinite,
            )
            steps += accumulated(calls, self._sum_fields(spans)) if adds else calls
        return steps

    # --- feedback -----------------------------------------------------------------

    def _settle(self, stage: int, segment: int, owners: Sequence[int]) -> list[Step]:
        """What the feedback does to residuals that all coding has written to."""
        steps: list[Step] = []
        for group, spans in self._groups_with_spans(stage, segment, owners):
            last = group.compressor.stages == stage + 1
            if last and group.feedback and self._feedback is not None:
                on = self._operands(group, stage, spans, self.rank)
                steps += self._feedback.settle_calls(on, self._whole("data"))
        return steps

    def _sum_fields(self, spans: SpanTable) -> dict[str, Any]:
        names = ("estimate0", "estimate1", "estimate_committed")
        return {
            "spans": spans,
            "input": self._whole(self._decoded),
            "output": self._whole("data"),
            "dtype": self.dtype,
            "residual": tuple(self._whole(name) for name in names),
            "nonfinite": self._whole("nonfinite"),
        }

    # --- headers ------------------------------------------------------------------

    def _write_header(self, buffer: str, message: Message) -> WriteHeader:
        place, flag = self._place(buffer, message), self._flag(buffer, message)
        return WriteHeader(place, message.header, self._whole("touched"), flag)

    def _read_header(self, place: Slice, message: Message, sender: int) -> ReadHeader:
        flag = self._flag(place.buffer, message)
        touched = self._whole("touched")
        return ReadHeader(place, message.header, touched, sender, flag)

    def _flag(self, buffer: str, message: Message) -> Slice | None:
        """Nobody but the owner looks at sums that stay in the data buffer: it says of
        them in the header whether they are finite."""
        told = buffer == "result" and message.kept
        return self._whole("nonfinite") if told else None
