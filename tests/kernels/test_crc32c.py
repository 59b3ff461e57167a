"""CRC-32C of the compiled module, by instruction and by table, against a bit loop."""

from __future__ import annotations

import numpy as np
import pytest

# RFC 3720, appendix B.4; the last is the check value of the CRC catalogues.
KNOWN = [
    (b"\0" * 32, 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
]


def bitwise(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def compiled(data: bytes, value: int = 0, *, portable: bool) -> int:
    from commkern import _core

    return _core.crc32c(data, value, portable)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_answers(data: bytes, expected: int, portable: bool) -> None:
    assert compiled(data, portable=portable) == expected


@pytest.mark.parametrize("portable", [False, True])
def test_lengths_and_alignments(portable: bool) -> None:
    data = np.random.default_rng(6).bytes(5000)
    for start in (0, 1, 7):
        for length in [*range(70), 511, 512, 1023, 1025, 3000, 4990]:
            piece = memoryview(data)[start : start + length]
            assert compiled(piece, portable=portable) == bitwise(bytes(piece)), length


@pytest.mark.parametrize("portable", [False, True])
def test_continues_from_the_crc_of_what_precedes(portable: bool) -> None:
    data = np.random.default_rng(8).bytes(100)
    for cut in (0, 1, 33, 100):
        begun = compiled(data[:cut], portable=portable)
        assert compiled(data[cut:], begun, portable=portable) == bitwise(data)
