"""Received headers, byte by byte: what is accepted, and what is said otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.plans import buffers_of, data_of, gather_plan, header

from commkern import runner
from commkern.errors import PayloadError
from commkern.wire import validate
from commkern.wire.message import pack_message
from commkern.wire.preamble import unpack

NUMEL, STEP = 5, 2**33 + 1


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def backend(request, monkeypatch):
    monkeypatch.setenv("COMMKERN_BACKEND", request.param)


class Peer:
    """Stands for rank 1 of 2: every round brings the same message."""

    def __init__(self, buffers, message):
        self._buffers = buffers
        self._message = message

    def post(self, number):
        pass

    def complete(self, number):
        stride = len(self._buffers["parts"]) // 2
        place = self._buffers["parts"][stride : stride + len(self._message)]
        place[:] = np.frombuffer(self._message, np.uint8)


def message(touched=(False, True), *, crc=False, step=STEP, nonfinite=False):
    head = header(NUMEL, 2, crc)
    head = replace(head, touched=touched, step=step, nonfinite=nonfinite)
    return pack_message(head, [data_of(1, NUMEL).tobytes()])


def receive(raw, nonfinite=0, **changes):
    plan = gather_plan(0, 2, NUMEL, **changes)
    buffers = buffers_of(plan)
    if nonfinite:
        buffers["nonfinite"][2] = nonfinite
    registers = {"seed": 0, "step": STEP}
    runner.run(plan, list(buffers.values()), registers, Peer(buffers, raw))
    return buffers


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("touched", [(False, False), (False, True), (True, True)])
def test_a_message_of_the_wire_package_is_accepted(crc, touched):
    buffers = receive(message(touched, crc=crc), crc=crc)
    result = buffers["result"].view(np.float32)
    assert np.array_equal(result, [*data_of(0, NUMEL), *data_of(1, NUMEL)])
    assert [bool(t) for t in buffers["touched"]] == [True, touched[1]]


@pytest.mark.parametrize("crc", [False, True])
def test_what_is_sent_is_valid(crc):
    buffers = receive(message(crc=crc), crc=crc)
    sent = validate(buffers["outgoing"])
    assert (sent.step, sent.touched, sent.crc) == (STEP, (True, False), crc)


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_the_flag_of_values_not_finite_is_sent_and_read(crc, ours, theirs):
    raw = message(crc=crc, nonfinite=theirs)
    buffers = receive(raw, nonfinite=9 * ours, crc=crc, flagged=True)
    sent = validate(buffers["outgoing"])
    assert (sent.nonfinite, sent.crc, sent.touched) == (ours, crc, (True, False))
    assert buffers["nonfinite"].tolist() == [theirs, 0, 9 * ours]


def test_other_flags_are_refused_where_that_one_is_read():
    raw = message(nonfinite=True)
    raw[6] |= 2
    with pytest.raises(PayloadError, match="flags: expected 4, got 6"):
        receive(raw, flagged=True)


def test_what_is_announced_is_what_is_sent():
    buffers = receive(message())
    ours = unpack(buffers["preambles_out"][64:])
    theirs = unpack(buffers["preambles_expected"][64:])
    assert (ours.sender, theirs.sender) == (0, 1)
    for one in (ours, theirs):
        assert (one.world_size, one.step, one.round) == (2, STEP, 0)
        assert one.body_nbytes == len(buffers["outgoing"])
    assert not buffers["preambles_out"][:64].any()


CHANGES = [
    (0, "magic: expected"),
    (4, "version: expected 1, got 254"),
    (6, "flags: expected 0, got 255"),
    (8, "sections: expected 1, got 254"),
    (12, "parameters: expected 2, got 253"),
    (16, f"step: expected {STEP}, got"),
    (24, "message size: expected 92, got"),
    (32, "byte 32 (section table): expected 0, got 255"),
    (63, "byte 63 (section table): expected 0, got 255"),
    (64, "padding of the parameter bits: expected 0, got 1 in bit 2"),
    (71, "padding of the parameter bits: expected 0, got 1 in bit 56"),
]


@pytest.mark.parametrize(("at", "text"), CHANGES)
def test_a_changed_byte_is_named(at, text):
    raw = message()
    raw[at] ^= 0xFF
    with pytest.raises(PayloadError) as caught:
        receive(raw)
    assert f"rank 0, step {STEP}: message from rank 1: {text}" in str(caught.value)


def test_every_byte_is_covered_by_the_checksum():
    raw = message(crc=True)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1
        with pytest.raises(PayloadError, match="message from rank 1"):
            receive(changed, crc=True)
