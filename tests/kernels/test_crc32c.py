"""CRC-32C against its check value and RFC 3720's examples, in every form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from commkern.reference.crc32c import crc32c as crc32c_numpy

# RFC 3720, appendix B.4; the last but one is the check value of the CRC catalogues.
KNOWN = [
    (b"\0" * 32, 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


def bitwise(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.fixture(params=["numpy", "compiled", "portable"])
def crc32c(request: pytest.FixtureRequest) -> Callable[[bytes], int]:
    if request.param == "numpy":
        return crc32c_numpy
    from commkern import _core

    return lambda data: _core.crc32c(data, portable=request.param == "portable")


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_answers(
    crc32c: Callable[[bytes], int], data: bytes, expected: int
) -> None:
    assert crc32c(data) == expected


def test_lengths(crc32c: Callable[[bytes], int]) -> None:
    data = np.random.default_rng(6).bytes(5000)
    for length in [*range(70), 511, 512, 1023, 1024, 1025, 2047, 3000, 5000]:
        assert crc32c(data[:length]) == bitwise(data[:length]), length


def test_one_flipped_bit_is_seen(crc32c: Callable[[bytes], int]) -> None:
    data = bytearray(np.random.default_rng(7).bytes(1500))
    whole = crc32c(bytes(data))
    for position in range(0, 1500, 41):
        data[position] ^= 1 << position % 8
        assert crc32c(bytes(data)) != whole
        data[position] ^= 1 << position % 8


def test_continuing() -> None:
    from commkern import _core

    data = np.random.default_rng(8).bytes(100)
    for portable in (True, False):
        for cut in (0, 1, 33, 100):
            first = _core.crc32c(data[:cut], portable=portable)
            assert _core.crc32c(data[cut:], first, portable) == bitwise(data)
