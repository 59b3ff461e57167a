"""Philox-4x32-10, vectorised.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC'11. Checked against the published known-answer vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(counters: Any, key: tuple[int, int]) -> Words:
    """Four random words for each counter.

    ``counters``: shape (..., 4), uint32. ``key``: two 32-bit words. Returns uint32 of
    the counters' shape.
    """
    words = np.asarray(counters, dtype=np.uint32)
    c0, c1, c2, c3 = (words[..., column].astype(np.uint64) for column in range(4))
    k0, k1 = key
    low = np.uint64(_MASK)
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def key_of(seed: int) -> tuple[int, int]:
    """The two key words of a 64-bit seed, low word first."""
    return seed & _MASK, seed >> 32


def draw_bytes(
    draws: npt.NDArray[np.int64], parameter_id: int, step: int, stream: int, seed: int
) -> npt.NDArray[np.uint8]:
    """Sixteen random bytes per draw: the four words, little-endian, in order.

    ``draws``: shape (n,), the index of each draw within the parameter (its low 32 bits
    count). Returns uint8 of shape (n, 16).
    """
    counters = np.empty((draws.size, 4), dtype=np.uint32)
    counters[:, 0] = draws & _MASK
    counters[:, 1:] = parameter_id, step, stream
    words = philox4x32(counters, key_of(seed)).astype("<u4")
    return words.view(np.uint8).reshape(draws.size, 16)
