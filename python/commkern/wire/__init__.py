"""The wire format: preambles and messages (docs/wire-format.md). Needs no torch."""

from commkern.wire.crc import crc32c, hash_text
from commkern.wire.message import (
    Descriptor,
    Header,
    Section,
    header_nbytes,
    pack_header,
    pack_message,
    parse_header,
    place,
)
from commkern.wire.preamble import Difference, Preamble, body_tag, difference
from commkern.wire.validate import validate

__all__ = [
    "Descriptor",
    "Difference",
    "Header",
    "Preamble",
    "Section",
    "body_tag",
    "crc32c",
    "difference",
    "hash_text",
    "header_nbytes",
    "pack_header",
    "pack_message",
    "parse_header",
    "place",
    "validate",
]
