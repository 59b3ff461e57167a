"""The 64-byte preamble that goes before every message.

Both ends build the preamble that they expect of each other; a mismatch of calls is
found by comparing 64 bytes, before any body is looked at. docs/wire-format.md
specifies the bytes; csrc/core/wire.h holds the same structure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from commkern.errors import PayloadError
from commkern.wire.crc import crc32c

MAGIC = b"CKPR"
VERSION = 1
NBYTES = 64
DATA, ERROR = 0, 1  # kinds

# Tags for transports that have them.
PREAMBLE_TAG = 0x434B0000
BODY_TAG = 0x44000000

_LAYOUT = struct.Struct("<4sHHIIQQIIIIIIII")
_CRC_OFFSET = 60

# What users call the fields, in the order in which a difference is looked for. The
# position is the field's code in an error preamble; the first means no field at all.
FIELDS = (
    "error",
    "version",
    "compressor",
    "settings",
    "parameter names",
    "shapes",
    "dtypes",
    "world size",
    "step",
    "message size",
    "round",
    "sender",
)
_ATTRIBUTES = {
    "parameter names": "names",
    "world size": "world_size",
    "message size": "body_nbytes",
}
# The fields between kind and reserved, as they lie.
_ORDER = (
    *("sender", "world_size", "step", "body_nbytes"),
    *("compressor", "settings", "names", "shapes", "dtypes", "round"),
)
_HASHED = frozenset(FIELDS[2:7])
# An error preamble carries no body and may be read in any round.
_CALL_FIELDS = FIELDS[1:9]
_VERSION_ALONE = FIELDS[1:2]


class Difference(NamedTuple):
    """The first field in which two preambles differ, as (field, mine, theirs)."""

    field: str
    mine: str
    theirs: str


@dataclass(frozen=True)
class Preamble:
    """One preamble. ``compressor`` to ``dtypes`` are CRC-32C of canonical strings;
    ``body_nbytes`` is the size of the message that follows, or the cause in a preamble
    of kind ``ERROR``."""

    sender: int
    world_size: int
    step: int = 0
    body_nbytes: int = 0
    compressor: int = 0
    settings: int = 0
    names: int = 0
    shapes: int = 0
    dtypes: int = 0
    round: int = 0
    kind: int = DATA
    version: int = VERSION

    def pack(self) -> bytes:
        """The 64 bytes. Raises ValueError for a field out of its range."""
        try:
            fields = [getattr(self, name) for name in _ORDER]
            packed = _LAYOUT.pack(MAGIC, self.version, self.kind, *fields, 0, 0)
        except struct.error as error:
            raise ValueError(f"{self} has a field out of range: {error}") from None
        body = packed[:_CRC_OFFSET]
        return body + crc32c(body).to_bytes(4, "little")

    @property
    def names_call(self) -> bool:
        """Whether it says of which call it is. An error preamble that does not comes
        from a rank that failed before it knew, or between two calls."""
        hashes = self.compressor, self.settings, self.names, self.shapes, self.dtypes
        return any(hashes)

    @property
    def cause(self) -> tuple[int, str]:
        """(rank, field) that an error preamble blames; field "error" means that the
        sender failed for a reason of its own."""
        code = self.body_nbytes >> 32
        if not 0 < code < len(FIELDS):
            return self.sender, FIELDS[0]
        return self.body_nbytes & 0xFFFFFFFF, FIELDS[code]


def unpack(data: Any) -> Preamble:
    """Read 64 bytes. Raises PayloadError unless they are a preamble; another version
    is no error here, so that `difference` can name it."""
    raw = bytes(data)
    if len(raw) != NBYTES:
        raise PayloadError(f"a preamble has {NBYTES} bytes, got {len(raw)}")
    magic, version, kind, *fields, reserved, crc = _LAYOUT.unpack(raw)
    if magic != MAGIC:
        raise PayloadError(f"a preamble begins with {MAGIC!r}, got {magic!r}")
    expected = crc32c(raw[:_CRC_OFFSET])
    if crc != expected:
        raise PayloadError(
            f"preamble's CRC-32C: its bytes give {expected:#010x}, it says {crc:#010x}"
        )
    if version == VERSION and (kind > ERROR or reserved):
        raise PayloadError(
            f"preamble's kind and reserved field: expected 0 or 1, and 0; "
            f"got {kind} and {reserved}"
        )
    return Preamble(
        **dict(zip(_ORDER, fields, strict=True)), kind=kind, version=version
    )


def error_preamble(
    mine: Preamble, rank: int | None = None, field: str = "error"
) -> bytes:
    """The bytes sent in the place of ``mine`` once a call has failed: because of
    ``rank``'s ``field`` (a name of `FIELDS`), or for a reason of our own."""
    blamed = mine.sender if rank is None else rank
    cause = FIELDS.index(field) << 32 | blamed
    return replace(mine, kind=ERROR, body_nbytes=cause).pack()


def difference(expected: Any, received: Any) -> Difference | None:
    """The first difference between two preambles of 64 bytes, None where they agree.

    ``expected`` must be a preamble of our own making. A received preamble of kind
    error that agrees in everything that describes the call, or names no call, gives
    field "error".
    """
    mine = unpack(expected)
    try:
        theirs = unpack(received)
    except PayloadError as error:
        return Difference("preamble", "64 valid bytes", str(error))
    failed = theirs.kind == ERROR
    of_errors = _CALL_FIELDS if theirs.names_call else _VERSION_ALONE
    for field in of_errors if failed else FIELDS[1:]:
        attribute = _ATTRIBUTES.get(field, field)
        here, there = getattr(mine, attribute), getattr(theirs, attribute)
        if here != there:
            show = hex if field in _HASHED else str
            return Difference(field, show(here), show(there))
    if failed:
        return Difference("error", "data", _blame(theirs))
    return None


def _blame(failed: Preamble) -> str:
    rank, field = failed.cause
    if field == FIELDS[0]:
        return f"an error on rank {failed.sender}"
    return f"rank {failed.sender} found that rank {rank} differs in {field}"


def body_tag(preamble: Any) -> int:
    """The tag of the messages of a call, from any of its preambles or their template:
    bodies of calls that differ in what all ranks share never meet."""
    one = unpack(preamble)
    hashes = (one.compressor, one.settings, one.names, one.shapes, one.dtypes)
    template = pack_template(*hashes, world_size=one.world_size)
    return BODY_TAG | (int.from_bytes(template[_CRC_OFFSET:], "little") & 0xFFFFFF)


def pack_template(
    compressor: int,
    settings: int,
    names: int,
    shapes: int,
    dtypes: int,
    *,
    world_size: int,
) -> bytes:
    """A preamble with the hashes (CRC-32C of canonical strings) that all ranks share;
    whoever sends it fills in sender, step, size and round, and the CRC."""
    shared = Preamble(
        sender=0,
        world_size=world_size,
        compressor=compressor,
        settings=settings,
        names=names,
        shapes=shapes,
        dtypes=dtypes,
    )
    return shared.pack()
