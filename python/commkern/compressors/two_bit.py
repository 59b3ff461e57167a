"""The two-bit quantiser with a threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.compressors.base import require
from commkern.compressors.block import BlockCoder
from commkern.compressors.registry import register
from commkern.formats import Format

_LEAST, _MOST = 1e-30, 1e30


@register
@dataclass(frozen=True)
class TwoBit(BlockCoder):
    """An element becomes +threshold, -threshold or, if smaller than that, 0.

    Parameters
    ----------
    threshold : 1e-30 to 1e30, in the gradient's unit

    The sum is coded with threshold times the world size, so that an average is 0 or
    +-threshold: the latter where all ranks agree. What is lost stays in the residuals;
    without error feedback it is useless, as small gradients never arrive.

    Biased. Bits per element: 2. Source: Strom, "Scalable distributed DNN training using
    commodity GPU cloud computing" (2015); MXNet's ``2bit`` gradient compression.
    """

    name: ClassVar[str] = "twobit"
    examples: ClassVar[tuple[str, ...]] = ("twobit:threshold=0.1",)

    threshold: float = 0.5

    def __post_init__(self) -> None:
        value = self.threshold
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{self.name}: threshold must be a number, got {value!r}")
        require(
            _LEAST <= value <= _MOST,
            f"{self.name}: threshold must be from {_LEAST} to {_MOST}, got {value}",
        )
        object.__setattr__(self, "threshold", float(value))

    def code_rounding(self) -> str:
        return "nearest"

    def block_format(self) -> Format:
        return Format(
            code="threshold",
            bits=2,
            scales="span",
            statistic="constant",
            constant=self.threshold,
        )
