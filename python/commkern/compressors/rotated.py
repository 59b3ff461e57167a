"""A randomised Hadamard transform before another block quantiser."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.base import Compressor, require
from commkern.compressors.block import BlockCoder, check_int
from commkern.compressors.quantize import Quantize
from commkern.compressors.registry import compressor_class, compressors, register
from commkern.formats import ROTATIONS, Format

_INNER = Quantize(bits=4)
_RANGE = (ROTATIONS[0], ROTATIONS[-1])


@register
@dataclass(frozen=True)
class Rotated(BlockCoder):
    """Pieces of ``block_size`` elements are rotated before ``inner`` codes them, and
    rotated back after: the error of an outlier is spread over its piece.

    Parameters
    ----------
    inner : a block quantiser other than "twobit" and "sign:scale=none"
        Its own blocks are those of rotated elements.
    block_size : a power of two from 32 to 4096
        Elements that are rotated together; a multiple or a divisor of the inner one's.

    The rotation is a Hadamard transform of x with signs from a fixed random sequence,
    equal for all parameters, ranks and steps. Parts are summed as they are, without
    being rotated back. A piece whose sum of magnitudes overflows becomes NaN.

    Bits per element, bias and the bounds on |C(x) - x|^2 are those of ``inner``.
    Source: Suresh et al., "Distributed mean estimation with limited communication"
    (2017).
    """

    name: ClassVar[str] = "rotated"
    examples: ClassVar[tuple[str, ...]] = (
        "rotated:inner=(ternary:block_size=64),block_size=32",
        "rotated:inner=(quantize:bits=4,scale_dtype=fp16),block_size=128",
    )

    inner: Compressor = _INNER
    block_size: int = 1024

    def __post_init__(self) -> None:
        check_int(self.name, "block_size", self.block_size, *_RANGE)
        require(
            self.block_size in ROTATIONS,
            f"{self.name}: block_size must be one of {', '.join(map(str, ROTATIONS))}, "
            f"got {self.block_size}",
        )
        if not isinstance(self.inner, Compressor):
            raise TypeError(
                f"{self.name}: inner must be a compressor, got {self.inner!r}"
            )
        self._check_inner()

    def _check_inner(self) -> None:
        if not _rotatable(self.inner):
            raise ValueError(
                f"{self.name}: inner must be one of {', '.join(_allowed())}, with a "
                f"scale from its elements, got {self.inner}"
            )
        inner = self._coder.block_format().block_size
        require(
            inner % self.block_size == 0 or self.block_size % inner == 0,
            f"{self.name}: block_size must be a multiple or a divisor of inner's "
            f"{inner}, got {self.block_size}",
        )

    @property
    def _coder(self) -> BlockCoder:
        assert isinstance(self.inner, BlockCoder)
        return self.inner

    def code_rounding(self) -> str:
        return self._coder.code_rounding()

    def block_format(self) -> Format:
        return dataclasses.replace(self._coder.block_format(), rotation=self.block_size)


def _allowed() -> list[str]:
    """Names of the compressors that can be rotated in some form."""
    classes = (compressor_class(name) for name in compressors())
    return [cls.name for cls in classes if cls is not Rotated and _rotatable(cls())]


def _rotatable(coder: object) -> bool:
    return (
        isinstance(coder, BlockCoder)
        and not isinstance(coder, Rotated)
        and coder.block_format().statistic != "constant"
    )
