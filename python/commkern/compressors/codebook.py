"""Codes that are indices into a fixed table of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.block import BlockCoder, check_block_size, check_choice
from commkern.compressors.registry import register
from commkern.formats import Format

#: Book -> bits of an index, and the block size that it was published with.
BOOKS = {"nf4": (4, 64), "dynamic8": (8, 256)}


@register
@dataclass(frozen=True)
class CodeBook(BlockCoder):
    """Every element becomes the nearest of a table's values, times the block's absmax.

    Parameters
    ----------
    book : "nf4" or "dynamic8"
        "nf4": 16 quantiles of a normal distribution; "dynamic8": 256 values over seven
        decades (without -1: a block's largest value loses 0.7 % if it is negative).
    block_size : a multiple of 8 from 16 to 8192
        Elements that share a scale; None stands for the published size: 64 for nf4, 256
        for dynamic8.

    Biased. Bits per element: 4 or 8, + 32 / block_size. Source: Dettmers et al.,
    "QLoRA" (2023), for nf4; Dettmers, "8-bit approximations for parallelism in deep
    learning" (2015), and bitsandbytes for dynamic8.
    """

    name: ClassVar[str] = "codebook"
    examples: ClassVar[tuple[str, ...]] = ("codebook:book=dynamic8",)

    book: str = "nf4"
    block_size: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.name, "book", self.book, tuple(BOOKS))
        if self.block_size is None:
            object.__setattr__(self, "block_size", BOOKS[self.book][1])
        check_block_size(self.name, self.block_size)

    def code_rounding(self) -> str:
        return "nearest"

    def block_format(self) -> Format:
        bits, published = BOOKS[self.book]
        return Format(
            code=self.book, bits=bits, block_size=self.block_size or published
        )
