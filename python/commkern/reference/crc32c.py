"""CRC-32C (Castagnoli): reflected, initial value and final xor 0xffffffff.

Source: RFC 3720, appendix B.4. Long inputs are dealt to a power of two of lanes that
NumPy advances together; the CRC is linear, so neighbours merge pairwise by the map
"append as many zero bytes" (as in zlib's crc32_combine).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from commkern.arrays import Bytes, as_bytes

Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_LANE_NBYTES = 512


def _make_table() -> Words:
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
    while raw.size >= 2 * _LANE_NBYTES:
        lanes = 1 << (raw.size // _LANE_NBYTES).bit_length() - 1
        nbytes = lanes * _LANE_NBYTES
        register = _advance_lanes(register, raw[:nbytes].reshape(lanes, _LANE_NBYTES))
        raw = raw[nbytes:]
    for byte in raw.tobytes():
        register = _TABLE_LIST[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register ^ _ONES


def _advance_lanes(register: int, lanes: Bytes) -> int:
    state = np.zeros(len(lanes), np.uint32)
    state[0] = register
    four_zeros = _zeros_table(2)
    for words in np.ascontiguousarray(lanes.view("<u4").T):
        state = _lookup(four_zeros, state ^ words)
    log2_nbytes = _LANE_NBYTES.bit_length() - 1
    while state.size > 1:
        state = _lookup(_zeros_table(log2_nbytes), state[0::2]) ^ state[1::2]
        log2_nbytes += 1
    return int(state[0])


@lru_cache(maxsize=64)
def _zeros_table(log2_nbytes: int) -> Words:
    """Row b, column v: the register v << 8b after 2**log2_nbytes zero bytes."""
    values = np.arange(256, dtype=np.uint32)
    table = np.stack([values << np.uint32(8 * byte) for byte in range(4)])
    if log2_nbytes == 0:
        one_zero: Words = _TABLE[table & np.uint32(0xFF)] ^ (table >> np.uint32(8))
        return one_zero
    half = _zeros_table(log2_nbytes - 1)
    return _lookup(half, _lookup(half, table.reshape(-1))).reshape(4, 256)


def _lookup(table: Words, registers: Words) -> Words:
    low = np.uint32(0xFF)
    found: Words = table[0][registers & low]
    for byte in range(1, 4):
        found ^= table[byte][(registers >> np.uint32(8 * byte)) & low]
    return found
