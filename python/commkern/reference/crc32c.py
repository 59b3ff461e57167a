"""CRC-32C (Castagnoli): reflected, initial value and final xor 0xffffffff.

Source: RFC 3720, appendix B.4. Long inputs are cut into lanes that NumPy advances
together; the CRC is linear, so a lane's value is carried over the lanes behind it by
the map "append as many zero bytes" (as in zlib's crc32_combine).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from commkern.arrays import as_bytes

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_LANES = 256


def _make_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        carry = np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
        table = (table >> np.uint32(1)) ^ carry
    return table


_TABLE = _make_table()
_TABLE_LIST = [int(value) for value in _TABLE]


def crc32c(data: Any, value: int = 0) -> int:
    """The CRC of ``data`` (anything ``as_bytes`` takes), continuing from ``value``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    raw = as_bytes(data)
    register = value ^ _ONES
    lane_nbytes = raw.size // _LANES
    if lane_nbytes >= 8:
        register = _advance_lanes(register, raw[: lane_nbytes * _LANES])
        raw = raw[lane_nbytes * _LANES :]
    for byte in raw.tobytes():
        register = _TABLE_LIST[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register ^ _ONES


def _advance_lanes(register: int, raw: npt.NDArray[np.uint8]) -> int:
    lanes = np.zeros((raw.size // _LANES, _LANES + 32), dtype=np.uint32)
    lanes[:, :_LANES] = raw.reshape(_LANES, -1).T
    state = np.zeros(_LANES + 32, dtype=np.uint32)
    state[_LANES:] = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for column in lanes:
        state = _TABLE[(state ^ column) & np.uint32(0xFF)] ^ (state >> np.uint32(8))
    shifted_basis = [int(v) for v in state[_LANES:]]
    for lane in state[:_LANES]:
        register = _shift(register, shifted_basis) ^ int(lane)
    return register


def _shift(register: int, shifted_basis: list[int]) -> int:
    result = 0
    for bit, image in enumerate(shifted_basis):
        if register >> bit & 1:
            result ^= image
    return result
