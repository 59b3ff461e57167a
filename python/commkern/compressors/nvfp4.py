"""NVFP4: floats of 4 bits in blocks of 16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import BlockCoder
from commkern.compressors.registry import register
from commkern.formats import Format


@register
@dataclass(frozen=True)
class NVFP4(BlockCoder):
    """Blocks of 16 floats of 4 bits (e2m1), a float of 8 bits (e4m3) as the scale of
    each, and one scale per parameter (per owner's share of it, after the reduction) in
    fp32 (fp64 for fp64 data).

    Everything is rounded to nearest and saturates. Biased. A block that is 28672 times
    smaller than the largest value of its parameter underflows to zeros. Bits per
    element: 4.5. Source: NVIDIA, "Introducing NVFP4" (2025).
    """

    name: ClassVar[str] = "nvfp4"

    def code_rounding(self) -> str:
        return "nearest"

    def block_format(self) -> Format:
        return Format(code="float4_e2m1", bits=4, block_size=16, scales="e4m3")
