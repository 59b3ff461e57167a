"""Block fixed point: integers with exponents that all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from commkern.compressors import bounds
from commkern.compressors.base import (
    PURPOSE_ROUNDING,
    Aggregation,
    Compressor,
    KernelCall,
    Operands,
    require,
    stream,
)
from commkern.compressors.block import check_block_size, check_rounding
from commkern.compressors.registry import register

SUPPORTED_BITS = (8, 16, 32)


@register
@dataclass(frozen=True)
class FixedPoint(Compressor):
    """Integer codes that are summed as they are: the sum is exact in any order.

    A first stage agrees on an exponent for each block, the largest of all ranks'; in
    the second, every rank scales its block by the same power of two and rounds, and the
    owner adds the integers. Nothing is coded twice, so a value meets one rounding.
    Codes leave room for the sum: with n ranks they are at most (2^(bits-1) - 1) / n, so
    every doubling of the ranks costs one of the ``bits``.
    ``csrc/kernels/fixed_point.h`` states the arithmetic to the bit.

    Parameters
    ----------
    bits : 8, 16 or 32
        Of a code. 16 halves fp32 and leaves 12 bits to 8 ranks; 8 is for few ranks (63
        at most) and error feedback; 32 is for fp64, since a tensor that would not
        shrink travels as it is.
    block_size : a multiple of 8 from 16 to 8192
        Elements that share an exponent. Blocks start at each parameter.
    rounding : "nearest" (ties to even) or "stochastic"
        Stochastic rounding takes 8 random bits an element; its bias is at most 1/512 of
        a step. Steps are twice as large for it where n is a power of two.

    Source: SwitchML (Sapio et al., NSDI 2021), with powers of two as scales.
    """

    name: ClassVar[str] = "fixed_point"
    aggregation: ClassVar[Aggregation] = "linear"
    stages: ClassVar[int] = 2
    examples: ClassVar[tuple[str, ...]] = (
        "fixed_point:bits=8",
        "fixed_point:bits=8,block_size=24,rounding=stochastic",
        "fixed_point:bits=16,rounding=stochastic",
        "fixed_point:bits=32",
    )

    bits: int = 16
    block_size: int = 256
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise TypeError(f"{self.name}: bits must be an int, got {self.bits!r}")
        require(
            self.bits in SUPPORTED_BITS,
            f"{self.name}: bits must be one of {SUPPORTED_BITS}, got {self.bits}",
        )
        check_block_size(self.name, self.block_size)
        check_rounding(self.name, self.rounding)

    # --- size and layout ----------------------------------------------------------

    def stage_nbytes(self, stage: int, length: int, dtype: str) -> int:
        if stage == 0:
            return -(-length // self.block_size) * _exponent_nbytes(dtype)
        return length * self.bits // 8

    def body_nbytes(self, length: int, dtype: str) -> int:
        return self.stage_begin(1, length, dtype) + self.stage_nbytes(1, length, dtype)

    def alignment(self, dtype: str) -> int:
        return max(self.bits // 8, _exponent_nbytes(dtype))

    def granule(self, dtype: str) -> int:
        return self.block_size

    def largest(self, world_size: int) -> int:
        """The largest code: as many of them as there are ranks fit in ``bits``."""
        return int(2 ** (self.bits - 1) - 1) // world_size

    def digits(self, world_size: int) -> int:
        """A block with exponent e has steps of 2^(e - digits).

        Nearest rounding may clamp the values that round to 2^digits, an error below a
        step; for stochastic rounding that would be a bias.
        """
        fits = self.largest(world_size) + (self.rounding == "nearest")
        return fits.bit_length() - 1

    def check_world_size(self, world_size: int) -> None:
        most = int(2 ** (self.bits - 1) - 1) // 2
        require(
            world_size <= most,
            f"fixed_point: bits={self.bits} serves at most {most} ranks, "
            f"got {world_size}",
        )

    # --- composition of kernels ---------------------------------------------------

    def compress_calls(self, on: Operands, data: Any, payload: Any) -> list[KernelCall]:
        fields = self._blocks(on) | {"input": data, "payload": payload}
        fields["residual"] = on.residual
        if on.stage == 0:
            return [KernelCall("block_exponents", fields)]
        fields |= {
            "exponents": on.earlier,
            "bits": self.bits,
            "digits": self.digits(on.world_size),
            "largest": self.largest(on.world_size),
            "rounding": self.rounding,
            "seed": on.seed,
            "step": on.step,
            "stream": stream(PURPOSE_ROUNDING, 0, on.who),
        }
        return [KernelCall("fixed_quantize", fields)]

    def reduce_calls(
        self, on: Operands, parts: Sequence[Any], payload: Any
    ) -> list[KernelCall]:
        fields = {"parts": list(parts), "payload": payload}
        if on.stage == 0:
            return [KernelCall("max_exponents", self._blocks(on) | fields)]
        summed = {"spans": on.spans, "bits": self.bits}
        return [KernelCall("fixed_sum", summed | fields)]

    def decompress_calls(
        self,
        on: Operands,
        payload: Any,
        output: Any,
        *,
        scale: float = 1.0,
        nonfinite: Any = None,
        add: bool = False,
    ) -> list[KernelCall]:
        fields = self._blocks(on) | {"payload": payload, "output": output}
        fields |= {"bits": self.bits, "digits": self.digits(on.world_size)}
        fields |= {"scale": scale, "nonfinite": nonfinite}
        name = "fixed_dequantize_add" if add else "fixed_dequantize"
        return [KernelCall(name, fields)]

    def _blocks(self, on: Operands) -> dict[str, Any]:
        return {"spans": on.spans, "dtype": on.dtype, "block_size": self.block_size}

    # --- traits -------------------------------------------------------------------

    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def error_bound(
        self, absmax: float, dtype: str, largest: float | None = None
    ) -> float:
        if absmax == 0:
            return 0.0
        smallest, denormal = (-1022, -1074) if dtype == "float64" else (-126, -149)
        exponent = max(math.frexp(absmax)[1], smallest)
        step = math.ldexp(1.0, max(exponent - self.digits(1), denormal))
        if self.unbiased():
            return step
        return max(step / 2, absmax - self.largest(1) * step)

    def bits_per_element(self, dtype: str) -> float:
        return self.bits + 8 * _exponent_nbytes(dtype) / self.block_size

    def variance_bound(self, dtype: str) -> float | None:
        if not self.unbiased():
            return None
        return bounds.uniform_variance(self.block_size, 2.0 ** (1 - self.digits(1)))

    def contraction(self, dtype: str) -> float | None:
        """At worst the largest element is half of 2^digits steps, all others are half a
        step, and each loses half a step."""
        if self.unbiased():
            return None
        n = self.block_size
        return 1 - n / (n - 1 + 4.0 ** self.digits(1))


def _exponent_nbytes(dtype: str) -> int:
    return 2 if dtype == "float64" else 1
