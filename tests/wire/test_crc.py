"""CRC-32C against published values and a bit-by-bit model."""

from __future__ import annotations

import numpy as np
import pytest

from commkern.reference.crc32c import crc32c as crc32c_numpy
from commkern.wire import crc32c, hash_text

# RFC 3720, appendix B.4.
PUBLISHED = [
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (b"", 0),
]


def model(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("function", [crc32c, crc32c_numpy])
@pytest.mark.parametrize(("data", "expected"), PUBLISHED)
def test_published_values(function, data: bytes, expected: int) -> None:
    assert function(data) == expected


@pytest.mark.parametrize("function", [crc32c, crc32c_numpy])
@pytest.mark.parametrize("nbytes", [1, 511, 1023, 1024, 1025, 2047, 4096, 5000, 70_001])
def test_every_path_equals_the_model(function, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert function(data) == model(data)


@pytest.mark.parametrize("function", [crc32c, crc32c_numpy])
def test_takes_arrays_and_views(function) -> None:
    data = np.random.default_rng(0).bytes(3000)
    array = np.frombuffer(data, np.uint8)
    assert function(array) == function(memoryview(data)) == function(bytearray(data))
    assert function(array[1:]) == function(data[1:])


def test_text_is_hashed_as_utf8() -> None:
    assert hash_text("größe") == model("größe".encode())


def test_continues_from_the_crc_of_what_precedes() -> None:
    data = np.random.default_rng(1).bytes(5000)
    for cut in (0, 1, 700, 4000, 5000):
        begun = crc32c_numpy(data[:cut])
        assert crc32c_numpy(data[cut:], begun) == model(data)
