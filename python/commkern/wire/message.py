"""Messages: one header, a section table, parameter bits, bodies.

docs/wire-format.md specifies the bytes; csrc/core/wire.h holds the same structures.
Every message has exactly one form: `parse_header` accepts nothing that `pack_header`
would not have written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from commkern.errors import PayloadError
from commkern.wire.crc import crc32c, hash_text
from commkern.wire.dtypes import (
    DESCRIPTOR_CODES,
    DESCRIPTOR_NAMES,
    NAMES,
    NBYTES,
    REAL_PART,
)

MAGIC = b"CKMS"
VERSION = 1
HEADER_NBYTES = 32
SECTION_NBYTES = 32
CRC_NBYTES = 4
MAX_DIMENSIONS = 64
FLAG_CRC, FLAG_DESCRIPTOR, FLAG_NONFINITE = 1, 2, 4

_HEADER = struct.Struct("<4sHHIIQQ")
_SECTION = struct.Struct("<IIIB3sQQ")
_DESCRIPTOR = struct.Struct("<BBHI")
_FLAGS = FLAG_CRC | FLAG_DESCRIPTOR | FLAG_NONFINITE
_MAX_SIZE = 2**63 - 1

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Section:
    """Part of a message: the coded form of a range of its parameters.

    ``compressor`` is the CRC-32C of the compressor's canonical string, ``dtype`` the
    code of its parameters' dtype; ``offset`` counts bytes from the message's start.
    """

    first_parameter: int
    parameter_count: int
    compressor: int
    dtype: int
    nbytes: int
    offset: int = 0


@dataclass(frozen=True)
class Descriptor:
    """What a single tensor's message says of the tensor. ``dtype`` may be complex."""

    dtype: str
    shape: tuple[int, ...]
    compressor: str

    @property
    def real_dtype(self) -> str:
        """The dtype of the section's elements: that of the real parts."""
        return REAL_PART.get(self.dtype, self.dtype)

    @property
    def real_numel(self) -> int:
        """Number of the section's elements: two for each complex one."""
        return math.prod(self.shape) * (2 if self.dtype in REAL_PART else 1)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the uncompressed elements."""
        return self.real_numel * NBYTES[self.real_dtype]


@dataclass(frozen=True)
class Header:
    """Everything of a message but its bodies.

    ``touched`` holds one boolean per parameter: whether the sender's gradient has
    anything but zeros. `place` fills in the sections' offsets and ``message_nbytes``.
    """

    sections: tuple[Section, ...]
    touched: tuple[bool, ...]
    step: int = 0
    descriptor: Descriptor | None = None
    crc: bool = False
    nonfinite: bool = False
    message_nbytes: int = 0

    @property
    def flags(self) -> int:
        """The flag bits of the header."""
        described = FLAG_DESCRIPTOR if self.descriptor is not None else 0
        crc, nonfinite = FLAG_CRC * self.crc, FLAG_NONFINITE * self.nonfinite
        return crc | described | nonfinite

    @property
    def nbytes(self) -> int:
        """Bytes before the first section's body."""
        return header_nbytes(len(self.sections), len(self.touched), self.descriptor)

    def pack(self) -> bytes:
        """The `nbytes` bytes before the bodies. Raises ValueError as `pack_header`."""
        try:
            _check(self)
            fixed = (len(self.sections), len(self.touched), self.step)
            parts = [
                _HEADER.pack(MAGIC, VERSION, self.flags, *fixed, self.message_nbytes),
                *map(_pack_section, self.sections),
                _pack_bits(self.touched),
                _pack_descriptor(self.descriptor),
            ]
        except (struct.error, KeyError, PayloadError) as error:
            raise ValueError(f"cannot write this header: {error}") from None
        return b"".join(parts)


def align(nbytes: int, alignment: int = 8) -> int:
    """The next multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def bits_nbytes(parameters: int) -> int:
    """Bytes of the parameter bits, padding included."""
    return align(-(-parameters // 8))


def descriptor_nbytes(descriptor: Descriptor | None) -> int:
    """Bytes of a descriptor, padding included."""
    if descriptor is None:
        return 0
    name = descriptor.compressor.encode()
    return align(_DESCRIPTOR.size + 8 * len(descriptor.shape) + len(name))


def header_nbytes(
    sections: int, parameters: int, descriptor: Descriptor | None = None
) -> int:
    """Bytes before the bodies: header, section table, parameter bits, descriptor."""
    table = HEADER_NBYTES + SECTION_NBYTES * sections
    return table + bits_nbytes(parameters) + descriptor_nbytes(descriptor)


def place(header: Header) -> Header:
    """The same header with every section's offset and the message's size filled in."""
    placed = []
    end = header.nbytes
    for section in header.sections:
        section = replace(section, offset=align(end))
        end = section.offset + section.nbytes
        placed.append(section)
    total = end + CRC_NBYTES * header.crc
    return replace(header, sections=tuple(placed), message_nbytes=total)


def pack_header(
    sections: Sequence[Section], *, parameter_count: int, message_nbytes: int
) -> bytes:
    """The header of a bucket's message as a template: step and parameter bits are 0.

    Raises ValueError for fields out of range, and for offsets or a size other than
    those that `place` gives.
    """
    touched = (False,) * parameter_count
    return Header(tuple(sections), touched, message_nbytes=message_nbytes).pack()


def pack_message(header: Header, bodies: Sequence[Any]) -> bytearray:
    """A whole message: the placed header, one body per section, the CRC if flagged."""
    message = bytearray(header.message_nbytes)
    message[: header.nbytes] = header.pack()
    for section, body in zip(header.sections, bodies, strict=True):
        raw = bytes(body)
        if len(raw) != section.nbytes:
            raise ValueError(f"section has {section.nbytes} bytes, body {len(raw)}")
        message[section.offset : section.offset + len(raw)] = raw
    if header.crc:
        seal(message)
    return message


def seal(message: Any) -> None:
    """Write the trailing CRC-32C of a complete message, in place."""
    raw = np.frombuffer(message, dtype=np.uint8)
    crc = crc32c(raw[:-CRC_NBYTES])
    raw[-CRC_NBYTES:] = np.frombuffer(crc.to_bytes(CRC_NBYTES, "little"), np.uint8)


def _pack_bits(touched: Sequence[bool]) -> bytes:
    """Parameter bits: bit p % 8 (from the least significant) of byte p // 8."""
    bits = np.packbits(np.asarray(touched, dtype=bool), bitorder="little")
    return bits.tobytes().ljust(bits_nbytes(len(touched)), b"\0")


def _pack_section(section: Section) -> bytes:
    return _SECTION.pack(
        section.first_parameter,
        section.parameter_count,
        section.compressor,
        section.dtype,
        b"\0\0\0",
        section.offset,
        section.nbytes,
    )


def _pack_descriptor(descriptor: Descriptor | None) -> bytes:
    if descriptor is None:
        return b""
    name, shape = descriptor.compressor.encode(), descriptor.shape
    fixed = _DESCRIPTOR.pack(
        DESCRIPTOR_CODES[descriptor.dtype], len(shape), len(name), 0
    )
    raw = fixed + struct.pack(f"<{len(shape)}Q", *shape) + name
    return raw.ljust(align(len(raw)), b"\0")


def parse_header(data: Any) -> Header:
    """Read and check all that precedes the bodies of an untrusted message.

    ``data`` is any bytes-like object holding exactly the message. Raises PayloadError
    naming the field and both values; never reads outside ``data``. The bodies'
    padding and the CRC are `validate`'s.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    fixed = _fixed_fields(raw)
    flags, section_count, parameters, step, nbytes = fixed
    table_end = HEADER_NBYTES + SECTION_NBYTES * section_count
    bits_end = table_end + bits_nbytes(parameters)
    _fits("section table and parameter bits", bits_end, raw.size)
    table = raw[HEADER_NBYTES:table_end].tobytes()
    header = Header(
        sections=tuple(
            _parse_section(index, row)
            for index, row in enumerate(_SECTION.iter_unpack(table))
        ),
        touched=_parse_bits(raw[table_end:bits_end], parameters),
        step=step,
        descriptor=_parse_descriptor(raw[bits_end:])
        if flags & FLAG_DESCRIPTOR
        else None,
        crc=bool(flags & FLAG_CRC),
        nonfinite=bool(flags & FLAG_NONFINITE),
        message_nbytes=nbytes,
    )
    _check(header)
    return header


def _fixed_fields(raw: Bytes) -> tuple[int, int, int, int, int]:
    _fits("header", HEADER_NBYTES, raw.size)
    magic, version, flags, sections, parameters, step, nbytes = _HEADER.unpack_from(
        raw.data
    )
    _same("magic", MAGIC, magic)
    _same("version", VERSION, version)
    if flags & ~_FLAGS:
        raise PayloadError(f"flags: at most {_FLAGS:#x} is known, got {flags:#x}")
    _same("message size", nbytes, raw.size)
    return flags, sections, parameters, step, nbytes


def _parse_section(index: int, row: tuple[Any, ...]) -> Section:
    first, count, compressor, dtype, reserved, offset, nbytes = row
    _same(f"section {index}'s reserved bytes", b"\0\0\0", reserved)
    return Section(first, count, compressor, dtype, nbytes, offset)


def _parse_bits(raw: Bytes, parameters: int) -> tuple[bool, ...]:
    bits = np.unpackbits(raw, bitorder="little")
    if bits[parameters:].any():
        raise PayloadError(
            f"padding of the parameter bits: expected zeros after bit {parameters}, "
            f"got {raw.tobytes().hex()}"
        )
    return tuple(bits[:parameters].astype(bool).tolist())


def _parse_descriptor(raw: Bytes) -> Descriptor:
    _fits("descriptor", _DESCRIPTOR.size, raw.size)
    code, ndim, name_nbytes, reserved = _DESCRIPTOR.unpack_from(raw.data)
    _same("descriptor's reserved field", 0, reserved)
    name_begin = _DESCRIPTOR.size + 8 * ndim
    name_end = name_begin + name_nbytes
    _fits("descriptor", align(name_end), raw.size)
    padding = raw[name_end : align(name_end)]
    if padding.any():
        raise PayloadError(
            f"descriptor's padding: expected zeros, got {padding.tobytes().hex()}"
        )
    shape = struct.unpack_from(f"<{ndim}Q", raw.data, _DESCRIPTOR.size)
    _known("descriptor's dtype code", code, DESCRIPTOR_NAMES)
    try:
        compressor = raw[name_begin:name_end].tobytes().decode()
    except UnicodeDecodeError as error:
        raise PayloadError(
            f"descriptor's compressor: expected UTF-8, {error}"
        ) from None
    return Descriptor(DESCRIPTOR_NAMES[code], shape, compressor)


def _check(header: Header) -> None:
    _check_sections(header)
    if header.descriptor is not None:
        _check_shape(header.descriptor)
        _check_single(header, header.descriptor)


def _check_shape(descriptor: Descriptor) -> None:
    shape = descriptor.shape
    if len(shape) > MAX_DIMENSIONS:
        raise PayloadError(f"dimensions: at most {MAX_DIMENSIONS}, got {len(shape)}")
    # Strides must fit as well, so a size of 0 does not excuse the others.
    spanned = replace(descriptor, shape=tuple(max(size, 1) for size in shape))
    if spanned.dense_nbytes > _MAX_SIZE:
        raise PayloadError(f"shape: at most {_MAX_SIZE} bytes, got {descriptor}")


def _check_sections(header: Header) -> None:
    next_parameter, end = 0, header.nbytes
    for index, section in enumerate(header.sections):
        what = f"section {index}"
        _known(f"{what}'s dtype code", section.dtype, NAMES)
        stop = section.first_parameter + section.parameter_count
        if not next_parameter <= section.first_parameter < stop <= len(header.touched):
            raise PayloadError(
                f"{what}'s parameters: expected a range within "
                f"[{next_parameter}, {len(header.touched)}), "
                f"got [{section.first_parameter}, {stop})"
            )
        _same(f"{what}'s offset", align(end), section.offset)
        next_parameter, end = stop, section.offset + section.nbytes
    _same("end of the sections", header.message_nbytes - CRC_NBYTES * header.crc, end)


def _check_single(header: Header, descriptor: Descriptor) -> None:
    _same("sections beside a descriptor", 1, len(header.sections))
    _same("parameters beside a descriptor", 1, len(header.touched))
    section = header.sections[0]
    _same("section 0's dtype", descriptor.real_dtype, NAMES[section.dtype])
    named = hash_text(descriptor.compressor)
    _same("section 0's compressor hash", named, section.compressor)


def _known(what: str, code: int, names: dict[int, str]) -> None:
    if code not in names:
        raise PayloadError(f"{what}: expected one of {sorted(names)}, got {code}")


def _fits(what: str, needed: int, available: int) -> None:
    if needed > available:
        raise PayloadError(f"{what}: needs {needed} bytes, there are {available}")


def _same(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise PayloadError(f"{what}: expected {expected!r}, got {got!r}")
