"""Block quantisation to a few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.base import later, require
from commkern.compressors.block import (
    SCALE_DTYPES,
    BlockCoder,
    blocks,
    check_block_size,
    check_choice,
    check_int,
    check_rounding,
    scales_for,
)
from commkern.compressors.registry import register
from commkern.formats import Format


@register
@dataclass(frozen=True)
class Quantize(BlockCoder):
    """Block quantisation: a scale per block and ``bits`` bits an element.

    Symmetric: codes are integers from -L to L, L = 2^(bits-1) - 1, and the scale is
    absmax / L of the block. Otherwise they run from 0 to 2^bits - 1, between the
    smallest and the largest value of the block, and the smallest travels too.

    One bit has no symmetric code of that kind. It is the sign instead: to nearest with
    the mean of the block's magnitudes as its scale (absmax would be a bad one), or
    stochastic with the block's absmax, which is unbiased.

    Parameters
    ----------
    bits : 1 to 8
    block_size : a multiple of 8 from 16 to 8192, or None
        Elements that share a scale. Blocks start at each parameter. None: one scale per
        parameter (per owner's share of it, after the reduction).
    rounding : "nearest" (ties to even) or "stochastic"
        Stochastic rounding takes 8 random bits an element and is unbiased but for 1/512
        of a step; rounding to nearest is biased.
    symmetric : bool
    scale_dtype : "fp32" (fp64 for fp64 data), "fp16", "bf16" or "e8m0" (powers of two)
        How scales travel; shorter ones are rounded up, so that nothing is cut off.

    Bits per element: ``bits`` + the scale's bits / block_size (twice that with an
    offset). Source: QSGD (Alistarh et al., 2017) with max scaling and blocks; with an
    offset Jacob et al. (2018).
    """

    name: ClassVar[str] = "quantize"
    examples: ClassVar[tuple[str, ...]] = (
        "quantize:bits=4",
        "quantize:bits=8,rounding=stochastic",
        "quantize:bits=4,block_size=16,rounding=stochastic",
        "quantize:bits=1",
        "quantize:bits=3,scale_dtype=fp16",
        "quantize:bits=5,block_size=None,rounding=stochastic",
        "quantize:bits=4,symmetric=False,scale_dtype=bf16",
    )

    bits: int = 8
    block_size: int | None = 128
    rounding: str = "nearest"
    symmetric: bool = later(True)
    scale_dtype: str = later("fp32")

    def __post_init__(self) -> None:
        check_int(self.name, "bits", self.bits, 1, 8)
        check_block_size(self.name, self.block_size, optional=True)
        check_rounding(self.name, self.rounding)
        if not isinstance(self.symmetric, bool):
            raise TypeError(
                f"{self.name}: symmetric must be a bool, got {self.symmetric!r}"
            )
        check_choice(self.name, "scale_dtype", self.scale_dtype, tuple(SCALE_DTYPES))
        require(
            self.scale_dtype != "e8m0" or (self.symmetric and self.bits > 1),
            f"{self.name}: scale_dtype must be fp32, fp16 or bf16 with bits=1 or "
            f"symmetric=False, got {self.scale_dtype!r}",
        )
        scales_for(self.name, self.block_size, self.scale_dtype)

    def code_rounding(self) -> str:
        return self.rounding

    def block_format(self) -> Format:
        code, statistic = "symmetric", "absmax"
        if not self.symmetric:
            code, statistic = "asymmetric", "range"
        elif self.bits == 1:
            code = "sign"
            statistic = "mean" if self.rounding == "nearest" else "absmax"
        return Format(
            code=code,
            bits=self.bits,
            block_size=blocks(self.block_size),
            scales=scales_for(self.name, self.block_size, self.scale_dtype),
            statistic=statistic,
        )
