"""Microscaling formats: short floats in blocks of 32 or 16 with a scale of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import BlockCoder, check_choice
from commkern.compressors.registry import register
from commkern.formats import Format

FORMATS = {
    "mxfp8_e4m3": ("float8_e4m3", 8),
    "mxfp8_e5m2": ("float8_e5m2", 8),
    "mxfp6_e3m2": ("float6_e3m2", 6),
    "mxfp6_e2m3": ("float6_e2m3", 6),
    "mxfp4": ("float4_e2m1", 4),
}


@register
@dataclass(frozen=True)
class Microscaling(BlockCoder):
    """Blocks of 32 floats of 8, 6 or 4 bits with a power of two as their scale.

    Parameters
    ----------
    format : "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3" or "mxfp4"

    The scale is 2^(floor(log2 absmax) - exponent of the largest float), elements are
    rounded to nearest and saturate: as in the specification's conversion (6.3). Biased.
    Bits per element: 8.25, 6.25 or 4.25. Source: "OCP Microscaling Formats (MX)
    specification", version 1.0 (2023).
    """

    name: ClassVar[str] = "microscaling"
    examples: ClassVar[tuple[str, ...]] = (
        "microscaling:format=mxfp8_e4m3",
        "microscaling:format=mxfp8_e5m2",
        "microscaling:format=mxfp6_e3m2",
        "microscaling:format=mxfp6_e2m3",
    )

    format: str = "mxfp4"

    def __post_init__(self) -> None:
        check_choice(self.name, "format", self.format, tuple(FORMATS))

    def code_rounding(self) -> str:
        return "nearest"

    def block_format(self) -> Format:
        code, bits = FORMATS[self.format]
        return Format(code=code, bits=bits, block_size=32, scales="ocp")
