"""Floats of 8 bits with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import (
    SCALE_DTYPES,
    BlockCoder,
    blocks,
    check_block_size,
    check_choice,
    scales_for,
)
from commkern.compressors.registry import register
from commkern.formats import Format

FORMATS = ("e4m3", "e5m2")


@register
@dataclass(frozen=True)
class Float8(BlockCoder):
    """Every element becomes a float of 8 bits, to nearest, absmax the largest.

    Parameters
    ----------
    format : "e4m3" (3 bits of mantissa, up to 448) or "e5m2" (2 bits, up to 57344)
    block_size : a multiple of 8 from 16 to 8192, or None
        Elements that share a scale; None: one per parameter (per owner's share of it,
        after the reduction).
    scale_dtype : "fp32" (fp64 for fp64 data), "fp16", "bf16" or "e8m0" (powers of two)

    Biased: an element loses 2^-4 of itself at most (e5m2: 2^-3), or half a step of the
    denormals where it is below absmax / 28672 (e5m2: 1e-9 absmax). Bits per element: 8
    + the scale's bits / block_size. Source: Micikevicius et al., "FP8 formats for deep
    learning" (2022).
    """

    name: ClassVar[str] = "float8"
    examples: ClassVar[tuple[str, ...]] = (
        "float8:format=e5m2,scale_dtype=e8m0",
        "float8:block_size=None",
    )

    format: str = "e4m3"
    block_size: int | None = 128
    scale_dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_choice(self.name, "format", self.format, FORMATS)
        check_block_size(self.name, self.block_size, optional=True)
        check_choice(self.name, "scale_dtype", self.scale_dtype, tuple(SCALE_DTYPES))
        scales_for(self.name, self.block_size, self.scale_dtype)

    def code_rounding(self) -> str:
        return "nearest"

    def block_format(self) -> Format:
        return Format(
            code=f"float8_{self.format}",
            bits=8,
            block_size=blocks(self.block_size),
            scales=scales_for(self.name, self.block_size, self.scale_dtype),
        )
