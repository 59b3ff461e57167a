"""Philox-4x32-10 against the known answers published with Random123."""

from __future__ import annotations

import numpy as np
import pytest

from commkern.reference.philox import draw_bytes, key_of, philox4x32

# kat_vectors of Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key).tolist() == list(expected)


def test_vectorised_form_equals_one_by_one() -> None:
    counters = np.random.default_rng(2).integers(0, 2**32, (5, 3, 4), dtype=np.uint32)
    together = philox4x32(counters, (7, 9))
    for index in np.ndindex(5, 3):
        assert together[index].tolist() == philox4x32(counters[index], (7, 9)).tolist()


def test_bytes_are_little_endian_words_in_order() -> None:
    assert key_of(0x299F31D0A4093822) == (0xA4093822, 0x299F31D0)
    draws = np.array([0x243F6A88, 0x1_243F6A88])  # the low 32 bits count
    raw = draw_bytes(draws, 0x85A308D3, 0x13198A2E, 0x03707344, 0x299F31D0A4093822)
    expected = b"".join(word.to_bytes(4, "little") for word in KNOWN[2][2])
    assert raw[0].tobytes() == raw[1].tobytes() == expected
