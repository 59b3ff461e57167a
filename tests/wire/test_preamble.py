"""Preambles: the bytes, and that a difference names its field."""

from __future__ import annotations

import dataclasses
import struct
from itertools import pairwise

import pytest

from commkern.errors import PayloadError
from commkern.wire import Preamble, body_tag, crc32c, difference
from commkern.wire.preamble import (
    ERROR,
    FIELDS,
    PREAMBLE_TAG,
    error_preamble,
    pack_template,
    unpack,
)

ONE = Preamble(
    sender=2,
    world_size=4,
    step=2**40 + 7,
    body_nbytes=2**33 + 1,
    compressor=0x01020304,
    settings=0x11121314,
    names=0x21222324,
    shapes=0x31323334,
    dtypes=0x41424344,
    round=5,
)
ATTRIBUTES = {
    "version": "version",
    "compressor": "compressor",
    "settings": "settings",
    "parameter names": "names",
    "shapes": "shapes",
    "dtypes": "dtypes",
    "world size": "world_size",
    "step": "step",
    "message size": "body_nbytes",
    "round": "round",
    "sender": "sender",
}


def test_bytes_are_the_documented_ones() -> None:
    raw = ONE.pack()
    assert len(raw) == 64
    assert raw[:8] == b"CKPR\x01\x00\x00\x00"
    assert struct.unpack_from("<II", raw, 8) == (2, 4)
    assert struct.unpack_from("<QQ", raw, 16) == (2**40 + 7, 2**33 + 1)
    assert struct.unpack_from("<5I", raw, 32) == (
        0x01020304,
        0x11121314,
        0x21222324,
        0x31323334,
        0x41424344,
    )
    assert struct.unpack_from("<III", raw, 52) == (5, 0, crc32c(raw[:60]))
    assert unpack(raw) == ONE


def test_template_holds_what_ranks_share() -> None:
    template = unpack(pack_template(1, 2, 3, 4, 5, world_size=8))
    assert template == Preamble(0, 8, 0, 0, 1, 2, 3, 4, 5)


def test_fields_cover_every_difference() -> None:
    assert ("error", *ATTRIBUTES) == FIELDS


@pytest.mark.parametrize("field", ATTRIBUTES)
def test_difference_names_the_field_and_both_values(field: str) -> None:
    attribute = ATTRIBUTES[field]
    other = getattr(ONE, attribute) + 1
    theirs = dataclasses.replace(ONE, **{attribute: other})
    found = difference(ONE.pack(), theirs.pack())
    assert found is not None
    hashed = field in FIELDS[2:7]
    show = hex if hashed else str
    assert found == (field, show(getattr(ONE, attribute)), show(other))


@pytest.mark.parametrize(("first", "second"), list(pairwise(FIELDS[1:])))
def test_difference_reports_the_first_field(first: str, second: str) -> None:
    changed = {ATTRIBUTES[f]: getattr(ONE, ATTRIBUTES[f]) + 1 for f in (first, second)}
    found = difference(ONE.pack(), dataclasses.replace(ONE, **changed).pack())
    assert found is not None
    assert found.field == first


def test_equal_preambles_do_not_differ() -> None:
    assert difference(ONE.pack(), bytearray(ONE.pack())) is None


def test_error_preamble_says_that_a_rank_failed() -> None:
    received = error_preamble(dataclasses.replace(ONE, round=9))
    found = difference(ONE.pack(), received)
    assert found == ("error", "data", "an error on rank 2")
    assert unpack(received).kind == ERROR
    assert unpack(received).cause == (2, "error")


def test_error_preamble_passes_on_whom_it_blames() -> None:
    received = error_preamble(ONE, rank=3, field="shapes")
    assert unpack(received).cause == (3, "shapes")
    found = difference(ONE.pack(), received)
    assert found == ("error", "data", "rank 2 found that rank 3 differs in shapes")


def test_error_preamble_of_another_call_names_the_field() -> None:
    received = error_preamble(dataclasses.replace(ONE, shapes=1))
    found = difference(ONE.pack(), received)
    assert found == ("shapes", hex(ONE.shapes), "0x1")


def test_error_preamble_that_names_no_call_is_read_in_any() -> None:
    received = error_preamble(Preamble(sender=3, world_size=4, step=9))
    found = difference(ONE.pack(), received)
    assert found == ("error", "data", "an error on rank 3")
    other = error_preamble(Preamble(sender=3, world_size=4, step=9, version=2))
    assert difference(ONE.pack(), other) == ("version", "1", "2")
    data = Preamble(sender=2, world_size=4, step=ONE.step).pack()
    assert difference(ONE.pack(), data) == ("compressor", hex(ONE.compressor), "0x0")


def test_unknown_cause_reads_as_an_error_of_the_sender() -> None:
    strange = dataclasses.replace(ONE, kind=ERROR, body_nbytes=2**64 - 1)
    assert unpack(strange.pack()).cause == (2, "error")


@pytest.mark.parametrize("nbytes", [*range(64), 65, 128])
def test_other_lengths_are_refused(nbytes: int) -> None:
    raw = ONE.pack().ljust(nbytes, b"\0")[:nbytes]
    with pytest.raises(PayloadError, match=rf"64 bytes, got {nbytes}"):
        unpack(raw)
    found = difference(ONE.pack(), raw)
    assert found is not None
    assert found.field == "preamble"


def test_every_corrupted_bit_is_noticed() -> None:
    raw = ONE.pack()
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            unpack(changed)
        found = difference(raw, changed)
        assert found is not None
        assert found.field == "preamble"


@pytest.mark.parametrize(("offset", "value"), [(6, 2), (56, 1)])
def test_unknown_kind_and_reserved_field_are_refused(offset: int, value: int) -> None:
    raw = bytearray(ONE.pack())
    raw[offset] = value
    raw[60:] = crc32c(bytes(raw[:60])).to_bytes(4, "little")
    with pytest.raises(PayloadError, match=str(value)):
        unpack(raw)


@pytest.mark.parametrize("field", ["sender", "step", "round", "compressor"])
def test_fields_out_of_range_are_a_mistake_of_the_caller(field: str) -> None:
    for value in (-1, 2**64):
        with pytest.raises(ValueError, match=str(value)):
            dataclasses.replace(ONE, **{field: value}).pack()


def test_body_tag_follows_from_what_ranks_share() -> None:
    hashes = (ONE.compressor, ONE.settings, ONE.names, ONE.shapes, ONE.dtypes)
    template = pack_template(*hashes, world_size=4)
    tag = body_tag(template)
    assert tag == 0x44000000 | (crc32c(template[:60]) & 0xFFFFFF)
    assert tag == body_tag(ONE.pack())
    for field in ("world_size", "compressor", "settings", "names", "shapes", "dtypes"):
        other = dataclasses.replace(ONE, **{field: getattr(ONE, field) + 1})
        assert body_tag(other.pack()) != tag
    assert PREAMBLE_TAG == 0x434B0000
