"""CRC-32C (Castagnoli, reflected): the check sum of the wire format."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_LANE_NBYTES = 512


def crc32c(data: Any) -> int:
    """CRC-32C of a bytes-like object, in [0, 2**32).

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return _implementation()(data)


def hash_text(text: str) -> int:
    """CRC-32C of a string's UTF-8 bytes: how names and settings travel."""
    return crc32c(text.encode())


@lru_cache(maxsize=1)
def _implementation() -> Callable[[Any], int]:
    if os.environ.get("COMMKERN_BACKEND") != "reference":
        try:
            core = import_module("commkern._core")
        except ImportError:
            return crc32c_numpy
        compiled: Callable[[Any], int] = core.crc32c
        return compiled
    return crc32c_numpy


def crc32c_numpy(data: Any) -> int:
    """CRC-32C without the compiled module.

    Bytes are dealt to a power of two of lanes of 512 bytes; all lanes advance
    together, and neighbours merge pairwise: crc(a + b) = shift(crc(a)) ^ crc(b).
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    state = 0xFFFFFFFF
    begin = 0
    while raw.size - begin >= 2 * _LANE_NBYTES:
        lanes = 1 << ((raw.size - begin) // _LANE_NBYTES).bit_length() - 1
        end = begin + lanes * _LANE_NBYTES
        state = _many_lanes(state, raw[begin:end].reshape(lanes, _LANE_NBYTES))
        begin = end
    return _bytewise(state, raw[begin:].tobytes()) ^ 0xFFFFFFFF


def _bytewise(state: int, data: bytes) -> int:
    table = _byte_table()
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state


def _many_lanes(state: int, lanes: npt.NDArray[np.uint8]) -> int:
    crc = np.zeros(len(lanes), np.uint32)
    crc[0] = state
    four_zeros = _shift_tables(2)
    for column in np.ascontiguousarray(lanes.view("<u4").T):
        crc = _lookup(four_zeros, crc ^ column)
    log2_nbytes = _LANE_NBYTES.bit_length() - 1
    while crc.size > 1:
        crc = _lookup(_shift_tables(log2_nbytes), crc[0::2]) ^ crc[1::2]
        log2_nbytes += 1
    return int(crc[0])


def _lookup(tables: Words, values: Words) -> Words:
    found: Words = tables[0][values & 0xFF]
    for index in range(1, 4):
        found ^= tables[index][(values >> np.uint32(8 * index)) & 0xFF]
    return found


@lru_cache(maxsize=1)
def _byte_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


@lru_cache(maxsize=64)
def _shift_tables(log2_nbytes: int) -> Words:
    """Row b, column v: the state v << 8b after 2**log2_nbytes zero bytes."""
    values = np.arange(256, dtype=np.uint32)
    shifted = np.stack([values << np.uint32(8 * index) for index in range(4)])
    if log2_nbytes == 0:
        table = np.array(_byte_table(), np.uint32)
        one_zero: Words = table[shifted & 0xFF] ^ (shifted >> np.uint32(8))
        return one_zero
    half = _shift_tables(log2_nbytes - 1)
    return _lookup(half, _lookup(half, shifted.reshape(-1))).reshape(4, 256)
