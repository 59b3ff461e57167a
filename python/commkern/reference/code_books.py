"""Codes that are indices into a table of values, exact in fp32.

The stored index is XORed with that of 0, so that a stored 0 decodes to 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commkern.reference.numerics import Floats

# T. Dettmers et al., "QLoRA: efficient finetuning of quantized LLMs", 2023, appendix E.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_POWERS_OF_TEN = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0)


@functools.cache
def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the signed dynamic map of 8 bits, sorted.

    Fractions of 0.1 ... 1 in 2^i steps for each decade, i bits of it, and 0 and 1.
    Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2015,
    as bitsandbytes has it.
    """
    values = [0.0, 1.0]
    for i, power in enumerate(_POWERS_OF_TEN):
        for j in range(1 << i):
            magnitude = power * (0.1 + 0.9 * (2 * j + 1) / (2 << i))
            values += [magnitude, -magnitude]
    return tuple(np.sort(np.array(values)).astype(np.float32).tolist())


class Book(NamedTuple):
    """A table of increasing values."""

    entries: npt.NDArray[np.float64]

    @property
    def zero(self) -> int:
        return int(np.flatnonzero(self.entries == 0)[0])

    def encode(self, values: Floats) -> npt.NDArray[np.int64]:
        """Of the nearest entry, the lower one in a tie: midpoints are exact in fp64."""
        midpoints = (self.entries[:-1] + self.entries[1:]) / 2
        index = np.searchsorted(midpoints, values.astype(np.float64), side="left")
        return index.astype(np.int64) ^ self.zero

    def values(self, compute: np.dtype[Any]) -> Floats:
        """By stored index."""
        by_stored = self.entries[np.arange(self.entries.size) ^ self.zero]
        exact: Floats = by_stored.astype(compute)
        return exact


BOOKS = {"nf4": Book(np.array(NF4)), "dynamic8": Book(np.array(dynamic_map()))}
