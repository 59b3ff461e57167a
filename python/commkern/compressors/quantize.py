"""Block quantisation to a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from commkern.compressors.base import (
    PURPOSE_ROUNDING,
    Aggregation,
    Compressor,
    KernelCall,
    Operands,
    require,
    stream,
)
from commkern.compressors.registry import register
from commkern.wire.dtypes import compute_nbytes

SUPPORTED_BITS = (4, 8)
ROUNDINGS = ("nearest", "stochastic")


@register
@dataclass(frozen=True)
class Quantize(Compressor):
    """Symmetric block quantisation: a scale per block and ``bits`` bits an element.

    The scale is absmax / (2^(bits-1) - 1) of the block, in fp32 (fp64 for fp64 data).
    ``csrc/kernels/quantize.h`` states the arithmetic to the bit.

    Parameters
    ----------
    bits : 4 or 8
    block_size : a multiple of 8 from 16 to 8192
        Elements that share a scale. Blocks start at each parameter.
    rounding : "nearest" (ties to even) or "stochastic"
        Stochastic rounding takes 8 random bits an element; its bias is at most 1/512 of
        a step.

    Source: QSGD (Alistarh et al., 2017) with max scaling and blocks.
    """

    name: ClassVar[str] = "quantize"
    aggregation: ClassVar[Aggregation] = "hop"
    examples: ClassVar[tuple[str, ...]] = (
        "quantize:bits=4",
        "quantize:bits=8,rounding=stochastic",
        "quantize:bits=4,block_size=16,rounding=stochastic",
    )

    bits: int = 8
    block_size: int = 128
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        for field, value in (("bits", self.bits), ("block_size", self.block_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"quantize: {field} must be an int, got {value!r}")
        require(
            self.bits in SUPPORTED_BITS,
            f"quantize: bits must be one of {SUPPORTED_BITS}, got {self.bits}",
        )
        require(
            16 <= self.block_size <= 8192 and self.block_size % 8 == 0,
            "quantize: block_size must be a multiple of 8 from 16 to 8192, "
            f"got {self.block_size}",
        )
        require(
            self.rounding in ROUNDINGS,
            f"quantize: rounding must be one of {ROUNDINGS}, got {self.rounding!r}",
        )

    def body_nbytes(self, length: int, dtype: str) -> int:
        blocks = -(-length // self.block_size)
        return blocks * compute_nbytes(dtype) + -(-length * self.bits // 8)

    def alignment(self, dtype: str) -> int:
        return compute_nbytes(dtype)

    def granule(self, dtype: str) -> int:
        return self.block_size

    def compress_calls(self, on: Operands, data: Any, payload: Any) -> list[KernelCall]:
        fields = self._coding(on, on.who) | {"input": data, "payload": payload}
        return [KernelCall("quantize", fields)]

    def reduce_calls(
        self, on: Operands, parts: Sequence[Any], payload: Any
    ) -> list[KernelCall]:
        fields = self._coding(on, on.who) | {"parts": list(parts), "payload": payload}
        return [KernelCall("requantize_sum", fields)]

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
        fields = self._format(on) | {"payload": payload, "output": output}
        fields |= {"scale": scale, "nonfinite": nonfinite}
        return [KernelCall("dequantize_add" if add else "dequantize", fields)]

    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def error_bound(self, absmax: float, dtype: str) -> float:
        step = absmax / float(2 ** (self.bits - 1) - 1)
        return step if self.rounding == "stochastic" else step / 2

    def _format(self, on: Operands) -> dict[str, Any]:
        return {
            "spans": on.spans,
            "dtype": on.dtype,
            "bits": self.bits,
            "block_size": self.block_size,
        }

    def _coding(self, on: Operands, who: int) -> dict[str, Any]:
        return self._format(on) | {
            "residual": on.residual,
            "rounding": self.rounding,
            "seed": on.seed,
            "step": on.step,
            "stream": stream(PURPOSE_ROUNDING, 0, who),
        }
