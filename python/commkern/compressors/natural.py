"""Natural compression: to a power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import BlockCoder, check_block_size, check_int
from commkern.compressors.registry import register
from commkern.formats import Format


@register
@dataclass(frozen=True)
class Natural(BlockCoder):
    """Every element is rounded to one of the two powers of two around it, at random.

    Parameters
    ----------
    bits : 2 to 8
        Of a sign and an exponent: powers of two from the block's absmax (rounded up to
        one) down by a factor of 2^(2^(bits-1) - 2), and 0.
    block_size : a multiple of 8 from 16 to 8192
        Elements that count exponents from the same power of two.

    Unbiased but for 1/512 of the distance between the two. Bits per element: ``bits`` +
    8 / block_size. Source: Horvath et al., "Natural compression for distributed deep
    learning" (2019), whose variance bound 1/8 holds; there with 9 bits and no scale.
    """

    name: ClassVar[str] = "natural"
    examples: ClassVar[tuple[str, ...]] = ("natural:bits=4,block_size=64",)

    bits: int = 8
    block_size: int = 128

    def __post_init__(self) -> None:
        check_int(self.name, "bits", self.bits, 2, 8)
        check_block_size(self.name, self.block_size)

    def code_rounding(self) -> str:
        return "stochastic"

    def block_format(self) -> Format:
        return Format(
            code="natural",
            bits=self.bits,
            block_size=self.block_size,
            scales="e8m0",
        )
