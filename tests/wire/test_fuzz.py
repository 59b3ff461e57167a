"""Arbitrary bytes: a message or a PayloadError, never anything else."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkern.errors import PayloadError
from commkern.wire import (
    Descriptor,
    Header,
    Section,
    difference,
    hash_text,
    pack_message,
    place,
    validate,
)
from commkern.wire.dtypes import CODES
from commkern.wire.preamble import Preamble

FUZZ = settings(max_examples=200, derandomize=True, deadline=None)
EXPECTED = Preamble(sender=0, world_size=2).pack()


@st.composite
def bucket_headers(draw: st.DrawFn) -> Header:
    ranges = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=5)
    )
    sections, parameter = [], 0
    for gap, count in ranges:
        parameter += gap
        code = draw(st.sampled_from(sorted(CODES.values())))
        nbytes = draw(st.integers(0, 40))
        compressor = draw(st.integers(0, 2**32 - 1))
        sections.append(Section(parameter, count, compressor, code, nbytes))
        parameter += count
    spare = draw(st.integers(0, 9))
    touched = draw(st.lists(st.booleans(), min_size=parameter + spare, max_size=200))
    return place(
        Header(
            tuple(sections),
            tuple(touched),
            step=draw(st.integers(0, 2**64 - 1)),
            crc=draw(st.booleans()),
            nonfinite=draw(st.booleans()),
        )
    )


@st.composite
def single_headers(draw: st.DrawFn) -> Header:
    dtype = draw(st.sampled_from(sorted(CODES)))
    shape = tuple(draw(st.lists(st.integers(0, 50), max_size=8)))
    text = draw(st.text(max_size=30))
    section = Section(0, 1, hash_text(text), CODES[dtype], draw(st.integers(0, 40)))
    descriptor = Descriptor(dtype, shape, text)
    return place(
        Header(
            (section,),
            (draw(st.booleans()),),
            descriptor=descriptor,
            crc=draw(st.booleans()),
        )
    )


headers = st.one_of(bucket_headers(), single_headers())


def message_of(header: Header) -> bytearray:
    rng = np.random.default_rng(header.message_nbytes)
    return pack_message(header, [rng.bytes(s.nbytes) for s in header.sections])


def accept_or_payload_error(data: bytes) -> None:
    try:
        header = validate(data)
    except PayloadError:
        return
    assert header.message_nbytes == len(data)
    assert header.pack() == data[: header.nbytes]


@given(headers)
@FUZZ
def test_round_trip(header: Header) -> None:
    assert validate(message_of(header)) == header


@given(st.binary(max_size=300))
@FUZZ
def test_arbitrary_bytes(data: bytes) -> None:
    accept_or_payload_error(data)
    accept_or_payload_error(b"CKMS\x01\x00" + data)
    found = difference(EXPECTED, data)
    assert found is not None
    assert found.field == "preamble"


@given(headers, st.data())
@FUZZ
def test_overwritten_messages(header: Header, data: st.DataObject) -> None:
    message = message_of(header)
    for _ in range(data.draw(st.integers(1, 4))):
        junk = data.draw(st.binary(min_size=1, max_size=8))
        at = data.draw(st.integers(0, len(message) - 1))
        message[at : at + len(junk)] = junk
    struct.pack_into("<Q", message, 24, len(message))
    accept_or_payload_error(bytes(message))


@pytest.mark.parametrize("seed", range(20))
def test_random_corruption_with_the_right_size(seed: int) -> None:
    """Blind corruption of many bytes at once, which single changes do not reach."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        count = int(rng.integers(1, 5))
        sections = tuple(
            Section(i, 1, 5, 0, int(rng.integers(0, 30))) for i in range(count)
        )
        message = message_of(place(Header(sections, (True,) * count)))
        for at in rng.integers(4, len(message), size=int(rng.integers(1, 6))):
            message[at] = rng.integers(0, 256)
        accept_or_payload_error(bytes(message))
