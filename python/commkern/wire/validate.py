"""The complete check of an untrusted message."""

from __future__ import annotations

from typing import Any

import numpy as np

from commkern.errors import PayloadError
from commkern.wire.crc import crc32c
from commkern.wire.message import CRC_NBYTES, Header, parse_header


def validate(data: Any) -> Header:
    """Check every byte of a message that is not a body, and its CRC where flagged.

    ``data`` is any bytes-like object holding exactly the message. Returns the header;
    each section's bytes lie within the message, behind the header, in order and apart.
    What a body must hold is its compressor's to check. Raises PayloadError naming what
    is wrong, with the value expected and the value found.
    """
    header = parse_header(data)
    raw = np.frombuffer(data, dtype=np.uint8)
    end = header.nbytes
    for index, section in enumerate(header.sections):
        padding = raw[end : section.offset]
        if padding.any():
            raise PayloadError(
                f"padding before section {index}: expected zeros, "
                f"got {padding.tobytes().hex()}"
            )
        end = section.offset + section.nbytes
    if header.crc:
        said = int.from_bytes(raw[-CRC_NBYTES:].tobytes(), "little")
        computed = crc32c(raw[:-CRC_NBYTES])
        if said != computed:
            raise PayloadError(
                f"CRC-32C: the bytes give {computed:#010x}, "
                f"the message says {said:#010x}"
            )
    return header
