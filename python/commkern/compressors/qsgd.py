"""QSGD: stochastic quantisation in units of a block's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import (
    BlockCoder,
    check_block_size,
    check_choice,
    check_int,
)
from commkern.compressors.registry import register
from commkern.formats import Format

_STATISTICS = {"l2": "l2", "linf": "absmax"}


@register
@dataclass(frozen=True)
class QSGD(BlockCoder):
    """Every element becomes one of 2^(bits-1) - 1 levels of its block's norm, or 0.

    Rounding is stochastic, so that the coding is unbiased (but for 1/512 of a level).

    Parameters
    ----------
    bits : 2 to 8
        Of a level and its sign.
    block_size : a multiple of 8 from 16 to 8192
        Elements that share a norm (the paper's bucket).
    norm : "l2" or "linf"

    Error feedback is of no use, and where the variance bound exceeds 1 (few bits, long
    blocks) residuals can grow without end: leave it off there.

    Bits per element: ``bits`` + 32 / block_size, without the paper's Elias coding.
    Source: Alistarh et al., "QSGD: communication-efficient SGD via gradient
    quantization and encoding" (2017); its variance bound min(n / L^2, sqrt(n) / L)
    holds with n = block_size and L levels.
    """

    name: ClassVar[str] = "qsgd"
    examples: ClassVar[tuple[str, ...]] = (
        "qsgd:bits=8,block_size=512",
        "qsgd:bits=3,block_size=64,norm=linf",
    )

    bits: int = 4
    block_size: int = 128
    norm: str = "l2"

    def __post_init__(self) -> None:
        check_int(self.name, "bits", self.bits, 2, 8)
        check_block_size(self.name, self.block_size)
        check_choice(self.name, "norm", self.norm, tuple(_STATISTICS))

    def code_rounding(self) -> str:
        return "stochastic"

    def block_format(self) -> Format:
        return Format(
            bits=self.bits,
            block_size=self.block_size,
            statistic=_STATISTICS[self.norm],
        )
