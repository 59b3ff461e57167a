"""The plan runner in Python: the twin of csrc/runtime, without the compiled module."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from commkern import reference
from commkern.arrays import Bytes
from commkern.compressors.base import KernelCall
from commkern.failure import Failure
from commkern.plan import (
    PURPOSES,
    Begin,
    Complete,
    Plan,
    Post,
    ReadHeader,
    Register,
    Slice,
    Step,
    WriteHeader,
)
from commkern.wire import preamble as wire_preamble
from commkern.wire.crc import crc32c
from commkern.wire.message import (
    CRC_NBYTES,
    FLAG_CRC,
    FLAG_NONFINITE,
    bits_nbytes,
    seal,
)

_HEADER_FIELDS = {
    "magic": slice(0, 4),
    "version": slice(4, 6),
    "flags": slice(6, 8),
    "sections": slice(8, 12),
    "parameters": slice(12, 16),
    "step": slice(16, 24),
    "message size": slice(24, 32),
}
_TABLE_BEGIN = 32


def run(
    plan: Plan, buffers: Sequence[Bytes], registers: Mapping[str, int], transport: Any
) -> dict[str, int]:
    """As `commkern.runner.run`, but raises `Failure` for what a peer's message has."""
    _check_buffers(plan, buffers)
    run = _Run(plan, dict(zip(plan.buffers, buffers, strict=True)), registers)
    run.write_preambles()
    times = dict.fromkeys((*PURPOSES, "exchange"), 0)
    purpose = PURPOSES[0]
    for step in plan.steps:
        begin = time.perf_counter_ns()
        if isinstance(step, Post):
            transport.post(step.round)
        elif isinstance(step, Complete):
            transport.complete(step.round)
        elif isinstance(step, Begin):
            purpose = step.purpose
        else:
            run.step(step)
        account = "exchange" if isinstance(step, (Post, Complete)) else purpose
        times[account] += time.perf_counter_ns() - begin
    return times


def _check_buffers(plan: Plan, buffers: Sequence[Bytes]) -> None:
    if len(buffers) != len(plan.buffers):
        raise ValueError(f"buffers: expected {len(plan.buffers)}, got {len(buffers)}")
    for (name, nbytes), buffer in zip(plan.buffers.items(), buffers, strict=True):
        if buffer.nbytes < nbytes:
            raise ValueError(
                f"buffer {name}: expected at least {nbytes} bytes, got {buffer.nbytes}"
            )


class _Run:
    """One run: the plan's names resolved to memory and numbers."""

    def __init__(
        self, plan: Plan, buffers: Mapping[str, Bytes], registers: Mapping[str, int]
    ) -> None:
        self._plan = plan
        self._buffers = buffers
        self._registers = registers

    def view(self, piece: Slice) -> Bytes:
        """The memory of a slice."""
        whole = self._buffers[piece.buffer]
        return whole[piece.offset : piece.offset + piece.nbytes]

    def write_preambles(self) -> None:
        """Ours, and those that we expect of our peers."""
        plan = self._plan
        shared = replace(
            wire_preamble.unpack(plan.preamble),
            world_size=plan.world_size,
            step=self._registers["step"],
        )
        for number, exchange in enumerate(plan.exchanges):
            for buffer, transfers in (
                ("preambles_out", exchange.sends),
                ("preambles_expected", exchange.receives),
            ):
                for transfer in transfers:
                    sender = plan.rank if buffer == "preambles_out" else transfer.peer
                    nbytes = transfer.nbytes
                    packed = replace(
                        shared, sender=sender, body_nbytes=nbytes, round=number
                    ).pack()
                    place = plan.preamble_place(buffer, number, transfer.peer)
                    self.view(place)[:] = bytearray(packed)

    def step(self, step: Step) -> None:
        """Run a step that is no exchange."""
        if isinstance(step, KernelCall):
            fields = {name: self._operand(v) for name, v in step.fields.items()}
            getattr(reference, step.name)(**fields)
        elif isinstance(step, WriteHeader):
            self._write_header(step)
        elif isinstance(step, ReadHeader):
            self._read_header(step)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Slice):
            return self.view(value)
        if isinstance(value, Register):
            return self._registers[value.name]
        if isinstance(value, (list, tuple)):
            return type(value)(self._operand(item) for item in value)
        return value

    def _write_header(self, step: WriteHeader) -> None:
        message, touched = self.view(step.message), self.view(step.touched)
        header = message[: len(step.template)]
        header[:] = bytearray(step.template)
        header[_HEADER_FIELDS["step"]] = self._step_bytes()
        begin, count, end = _bits(step.template)
        header[begin:end] = _packed(touched[:count] != 0, end - begin)
        if step.nonfinite is not None and self.view(step.nonfinite).any():
            header[_HEADER_FIELDS["flags"]][0] |= FLAG_NONFINITE
        if _field(header, "flags") & FLAG_CRC:
            seal(message[: _field(header, "message size")])

    def _read_header(self, step: ReadHeader) -> None:
        message, touched = self.view(step.message), self.view(step.touched)
        template = np.frombuffer(step.template, dtype=np.uint8).copy()
        template[_HEADER_FIELDS["step"]] = self._step_bytes()
        flagged = 0
        if step.nonfinite is not None:
            flagged = _field(message, "flags") & FLAG_NONFINITE
            template[_HEADER_FIELDS["flags"]][0] |= flagged
        text = _difference(template, message)
        if text is not None:
            text = f"message from rank {step.sender}: {text}"
            raise Failure("corrupt", step.sender, self._plan.rank, text)
        begin, count, end = _bits(step.template)
        bits = np.unpackbits(message[begin:end], bitorder="little")
        touched[:count] |= bits[:count]
        if flagged and step.nonfinite is not None:
            self.view(step.nonfinite)[0] = 1

    def _step_bytes(self) -> bytearray:
        return bytearray(self._registers["step"].to_bytes(8, "little"))


def _bits(template: Any) -> tuple[int, int, int]:
    """Where the parameter bits begin, how many there are, and where they end."""
    header = np.frombuffer(template, dtype=np.uint8)
    count = _field(header, "parameters")
    begin = _TABLE_BEGIN + 32 * _field(header, "sections")
    return begin, count, begin + bits_nbytes(count)


def _packed(flags: Any, nbytes: int) -> Bytes:
    packed = np.zeros(nbytes, dtype=np.uint8)
    bits = np.packbits(flags, bitorder="little")
    packed[: bits.size] = bits
    return packed


def _field(header: Bytes, name: str) -> int:
    return int.from_bytes(header[_HEADER_FIELDS[name]].tobytes(), "little")


def _difference(template: Bytes, message: Bytes) -> str | None:
    """What of a received header is not as the template says, parameter bits aside."""
    for name in _HEADER_FIELDS:
        expected, got = _field(template, name), _field(message, name)
        if expected != got:
            return f"{name}: expected {expected}, got {got}"
    begin, count, end = _bits(template)
    text = _unequal(template, message, "section table", _TABLE_BEGIN, begin)
    if text is not None:
        return text
    padding = np.unpackbits(message[begin:end], bitorder="little")[count:]
    if padding.any():
        bit = count + int(padding.argmax())
        return f"padding of the parameter bits: expected 0, got 1 in bit {bit}"
    text = _unequal(template, message, "descriptor", end, template.size)
    if text is None and _field(template, "flags") & FLAG_CRC:
        return _crc_difference(message[: _field(template, "message size")])
    return text


def _unequal(
    template: Bytes, message: Bytes, what: str, begin: int, end: int
) -> str | None:
    differ = template[begin:end] != message[begin:end]
    if not differ.any():
        return None
    at = begin + int(differ.argmax())
    return f"byte {at} ({what}): expected {template[at]}, got {message[at]}"


def _crc_difference(message: Bytes) -> str | None:
    computed = crc32c(message[:-CRC_NBYTES])
    said = int.from_bytes(message[-CRC_NBYTES:].tobytes(), "little")
    return None if computed == said else f"CRC-32C: expected {computed}, got {said}"
