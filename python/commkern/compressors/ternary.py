"""TernGrad: -1, 0 or 1 times the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import (
    BlockCoder,
    blocks,
    check_block_size,
    scales_for,
)
from commkern.compressors.registry import register
from commkern.formats import Format


@register
@dataclass(frozen=True)
class Ternary(BlockCoder):
    """-1, 0 or 1 times the block's absmax, drawn so that the expectation is the value.

    Parameters
    ----------
    block_size : a multiple of 8 from 16 to 8192, or None
        Elements that share a scale; None: one per parameter (per owner's share of it,
        after the reduction), as in the paper, which also clips gradients before.

    Unbiased but for 1/512 of the scale, with a variance above that of the gradient: use
    it without error feedback, whose residuals would outgrow the gradient. Bits per
    element: 1.6 (five to a byte) + 32 / block_size. Source: Wen et al., "TernGrad:
    ternary gradients to reduce communication in distributed deep learning" (2017).
    """

    name: ClassVar[str] = "ternary"
    examples: ClassVar[tuple[str, ...]] = ("ternary:block_size=None",)

    block_size: int | None = 128

    def __post_init__(self) -> None:
        check_block_size(self.name, self.block_size, optional=True)

    def code_rounding(self) -> str:
        return "stochastic"

    def block_format(self) -> Format:
        return Format(
            code="ternary",
            bits=2,
            block_size=blocks(self.block_size),
            scales=scales_for(self.name, self.block_size, "fp32"),
        )
