"""Dense codes of 1 to 8 bits: consecutive, little-endian bit order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of ``count`` codes; the last byte is padded with zero bits."""
    return -(-count * bits // 8)


def pack(codes: npt.NDArray[Any], bits: int) -> Bytes:
    """Pack integer ``codes`` (shape (n,)); code j fills bits [j*bits, (j+1)*bits).

    The low ``bits`` bits of each code are kept, so negative codes come out in two's
    complement. Returns uint8 of shape (ceil(n * bits / 8),).
    """
    _check_bits(bits)
    low = (codes.astype(np.int64) & 0xFF).astype(np.uint8)
    columns = np.unpackbits(low[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(columns.reshape(-1), bitorder="little")


def unpack(packed: Bytes, count: int, bits: int) -> npt.NDArray[np.int64]:
    """The first ``count`` codes of ``packed``, sign-extended, as int64."""
    _check_bits(bits)
    if packed_nbytes(count, bits) > packed.size:
        raise ValueError(
            f"{count} codes of {bits} bits need {packed_nbytes(count, bits)} bytes, "
            f"got {packed.size}"
        )
    stream = np.unpackbits(packed, count=count * bits, bitorder="little")
    weights = np.left_shift(1, np.arange(bits))
    weights[-1] = -weights[-1]
    signed: npt.NDArray[np.int64] = stream.reshape(count, bits).astype(np.int64)
    return signed @ weights


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be in 1..8, got {bits}")
