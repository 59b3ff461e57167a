"""Messages: round trips, truncation, corruption."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest

from commkern.errors import PayloadError
from commkern.wire import (
    Descriptor,
    Header,
    Section,
    crc32c,
    hash_text,
    header_nbytes,
    pack_header,
    pack_message,
    parse_header,
    place,
    validate,
)
from commkern.wire.message import seal

SINGLE = Descriptor("bfloat16", (3, 4), "cast:dtype=bf16")


def single(crc: bool = False, nbytes: int = 24) -> Header:
    section = Section(0, 1, hash_text(SINGLE.compressor), 3, nbytes)
    return place(Header((section,), (True,), step=9, descriptor=SINGLE, crc=crc))


def bucket(crc: bool = False) -> Header:
    sections = (
        Section(0, 3, 5, 0, 13),
        Section(3, 6, 6, 0, 0),
        Section(10, 1, 7, 2, 6),
    )
    touched = tuple(p % 3 == 0 for p in range(11))
    return place(Header(sections, touched, step=2**40, crc=crc, nonfinite=True))


HEADERS = {
    "single": single(),
    "single, crc": single(crc=True),
    "scalar": place(
        Header(
            (Section(0, 1, hash_text("identity"), 1, 8),),
            (False,),
            descriptor=Descriptor("float64", (), "identity"),
        )
    ),
    "complex": place(
        Header(
            (Section(0, 1, hash_text("identity"), 1, 64),),
            (True,),
            descriptor=Descriptor("complex128", (4, 1), "identity"),
        )
    ),
    "bucket": bucket(),
    "bucket, crc": bucket(crc=True),
    "empty": place(Header((), ())),
    "no sections": place(Header((), (True,) * 65, crc=True)),
}


def message_of(header: Header, seed: int = 0) -> bytearray:
    rng = np.random.default_rng(seed)
    return pack_message(header, [rng.bytes(s.nbytes) for s in header.sections])


@pytest.fixture(params=HEADERS)
def header(request: pytest.FixtureRequest) -> Header:
    return HEADERS[request.param]


def test_round_trip(header: Header) -> None:
    message = message_of(header)
    assert len(message) == header.message_nbytes
    assert validate(message) == header
    assert parse_header(bytes(message)) == header
    assert header.pack() == message[: header.nbytes]


def test_sizes() -> None:
    assert header_nbytes(0, 0) == 32
    assert header_nbytes(1, 1) == 72
    assert header_nbytes(2, 64) == 104
    assert header_nbytes(2, 65) == 112
    assert header_nbytes(1, 1, Descriptor("float32", (), "identity")) == 88
    assert header_nbytes(1, 1, SINGLE) == 72 + 8 + 16 + 16
    assert [s.offset for s in bucket().sections] == [136, 152, 152]
    assert bucket().message_nbytes == 158
    assert bucket(crc=True).message_nbytes == 162


def test_bytes_are_the_documented_ones() -> None:
    raw = bytes(message_of(bucket()))
    assert raw[:8] == b"CKMS\x01\x00\x04\x00"
    assert struct.unpack_from("<IIQQ", raw, 8) == (3, 11, 2**40, 158)
    assert struct.unpack_from("<IIIB3xQQ", raw, 96) == (10, 1, 7, 2, 152, 6)
    assert raw[128:136] == b"\x49\x02" + bytes(6)


def test_descriptor_bytes_are_the_documented_ones() -> None:
    raw = bytes(message_of(single()))
    assert raw[72:80] == b"\x03\x02\x0f\x00\x00\x00\x00\x00"
    assert struct.unpack_from("<QQ", raw, 80) == (3, 4)
    assert raw[96:112] == b"cast:dtype=bf16\0"


def test_template_has_zero_step_and_bits() -> None:
    sections = bucket().sections
    template = pack_header(sections, parameter_count=11, message_nbytes=158)
    header = parse_header(template + bytes(158 - len(template)))
    assert (header.step, header.touched) == (0, (False,) * 11)
    assert header.sections == sections


def test_every_truncation_is_rejected(header: Header) -> None:
    message = bytes(message_of(header))
    for nbytes in range(len(message)):
        with pytest.raises(PayloadError):
            validate(message[:nbytes])


def test_trailing_bytes_are_rejected(header: Header) -> None:
    message = message_of(header)
    for extra in (b"\0", bytes(8), b"x" * 33):
        with pytest.raises(PayloadError, match="message size"):
            validate(message + extra)


def test_every_corrupted_byte_is_rejected_or_harmless(header: Header) -> None:
    """Whatever passes is a message in its own right: written anew, the same bytes."""
    message = message_of(header)
    for position in range(len(message)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, message[position] ^ 4):
            changed = bytearray(message)
            changed[position] = value
            try:
                found = validate(changed)
            except PayloadError:
                continue
            assert found.pack() == changed[: found.nbytes]
            for section in found.sections:
                assert found.nbytes <= section.offset <= len(changed) - section.nbytes


@pytest.mark.parametrize("name", [name for name in HEADERS if "crc" in name])
def test_with_a_crc_every_corrupted_bit_is_rejected(name: str) -> None:
    message = message_of(HEADERS[name])
    for bit in range(8 * len(message)):
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            validate(message)
        message[bit // 8] ^= 1 << bit % 8
    validate(message)


def test_padding_must_be_zero() -> None:
    header = bucket(crc=True)
    first = header.sections[0]
    for position in range(first.offset + first.nbytes, header.sections[1].offset):
        message = message_of(header)
        message[position] = 1
        seal(message)
        with pytest.raises(PayloadError, match="padding before section 1"):
            validate(message)


def patched(header: Header, offset: int, layout: str, *values: int) -> bytearray:
    message = message_of(header)
    struct.pack_into(layout, message, offset, *values)
    return message


# What is wrong, where, the bytes, and what the error must name.
WRONG = [
    ("magic", 0, "<I", (0,), "magic"),
    ("version", 4, "<H", (2,), "version: expected 1, got 2"),
    ("unknown flag", 6, "<H", (8,), "flags"),
    ("too many sections", 8, "<I", (2**32 - 1,), "section table"),
    ("too many parameters", 12, "<I", (2**32 - 1,), "parameter bits"),
    ("fewer parameters", 12, "<I", (10,), r"parameters.*\[10, 11\)"),
    ("size", 24, "<Q", (2**64 - 1,), "message size: expected 18446744073709551615"),
    ("empty range", 36, "<I", (0,), "section 0's parameters"),
    ("range beyond the end", 68, "<I", (2**32 - 1,), "section 1's parameters"),
    ("ranges overlap", 64, "<I", (2,), "section 1's parameters"),
    ("dtype", 44, "<B", (4,), "section 0's dtype code"),
    ("reserved", 47, "<B", (1,), "section 0's reserved bytes"),
    ("offset in the header", 48, "<Q", (0,), "section 0's offset: expected 136, got 0"),
    ("offset not aligned", 48, "<Q", (137,), "section 0's offset"),
    ("offset beyond the end", 80, "<Q", (2**64 - 8,), "section 1's offset"),
    ("body beyond the end", 120, "<Q", (2**64 - 1,), "end of the sections"),
    ("body too short", 120, "<Q", (5,), "end of the sections"),
    ("bits beyond the last", 129, "<B", (0x08,), "padding of the parameter bits"),
    ("padding of the bits", 135, "<B", (1,), "padding of the parameter bits"),
]


@pytest.mark.parametrize(
    ("offset", "layout", "values", "match"),
    [case[1:] for case in WRONG],
    ids=[case[0] for case in WRONG],
)
def test_errors_name_the_field(offset, layout, values, match) -> None:
    with pytest.raises(PayloadError, match=match):
        validate(patched(bucket(), offset, layout, *values))


WRONG_DESCRIPTOR = [
    ("dtype code", 72, "<B", (6,), "descriptor's dtype code"),
    ("complex", 72, "<B", (4,), "expected 'float32', got 'bfloat16'"),
    ("another dtype", 72, "<B", (2,), "expected 'float16', got 'bfloat16'"),
    ("too many dimensions", 73, "<B", (255,), "descriptor: needs"),
    ("long name", 74, "<H", (65535,), "descriptor: needs"),
    ("short name", 74, "<H", (14,), "descriptor's padding"),
    ("reserved", 76, "<I", (1,), "descriptor's reserved field"),
    ("huge shape", 80, "<QQ", (2**63, 2**63), "shape"),
    ("huge but empty shape", 80, "<QQ", (2**63, 0), "shape"),
    ("another compressor", 96, "<B", (ord("k"),), "compressor hash"),
    ("not UTF-8", 96, "<B", (0xFF,), "UTF-8"),
    ("padding", 111, "<B", (1,), "descriptor's padding"),
    ("two parameters", 12, "<I", (2,), "parameters beside a descriptor"),
]


@pytest.mark.parametrize(
    ("offset", "layout", "values", "match"),
    [case[1:] for case in WRONG_DESCRIPTOR],
    ids=[case[0] for case in WRONG_DESCRIPTOR],
)
def test_descriptor_errors_name_the_field(offset, layout, values, match) -> None:
    with pytest.raises(PayloadError, match=match):
        validate(patched(single(), offset, layout, *values))


def test_too_many_dimensions_are_rejected_even_where_they_fit() -> None:
    shape = (1,) * 65
    with pytest.raises(ValueError, match="at most 64, got 65"):
        place(
            dataclasses.replace(
                single(), descriptor=dataclasses.replace(SINGLE, shape=shape)
            )
        ).pack()


def test_only_placed_headers_can_be_written() -> None:
    header = Header((Section(0, 1, 5, 0, 8),), (True,))
    with pytest.raises(ValueError, match="offset"):
        header.pack()
    with pytest.raises(ValueError, match="end of the sections"):
        dataclasses.replace(place(header), message_nbytes=81).pack()
    with pytest.raises(ValueError, match="dtype"):
        place(dataclasses.replace(header, sections=(Section(0, 1, 5, 9, 8),))).pack()
    with pytest.raises(ValueError, match="cannot write"):
        place(dataclasses.replace(header, step=-1)).pack()


def test_bodies_must_have_their_size() -> None:
    with pytest.raises(ValueError, match="24 bytes, body 23"):
        pack_message(single(), [bytes(23)])


def test_crc_covers_all_that_precedes_it() -> None:
    message = message_of(single(crc=True))
    assert message[-4:] == crc32c(bytes(message[:-4])).to_bytes(4, "little")
