"""Casts to a shorter float, and the identity, which is the cast to the same type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from commkern.compressors.base import (
    Aggregation,
    Compressor,
    KernelCall,
    Operands,
    require,
)
from commkern.compressors.registry import register
from commkern.wire.dtypes import NBYTES

_WIRE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Relative rounding error of a normal number, and the smallest normal number.
_ROUNDING = {
    "float16": (2.0**-11, 2.0**-14),
    "bfloat16": (2.0**-8, 2.0**-126),
    "float32": (2.0**-24, 2.0**-126),
    "float64": (2.0**-53, 2.0**-1022),
}


class _ElementWise(Compressor):
    """Elements travel one by one as another type; sums are taken in fp32 (fp64)."""

    aggregation: ClassVar[Aggregation] = "hop"

    def wire_dtype(self, dtype: str) -> str:
        raise NotImplementedError

    def body_nbytes(self, length: int, dtype: str) -> int:
        return length * NBYTES[self.wire_dtype(dtype)]

    def alignment(self, dtype: str) -> int:
        return NBYTES[self.wire_dtype(dtype)]

    def granule(self, dtype: str) -> int:
        return 128

    def compress_calls(self, on: Operands, data: Any, payload: Any) -> list[KernelCall]:
        fields = self._fields(on) | {"input": data, "payload": payload}
        return [KernelCall("cast", fields | {"residual": on.residual})]

    def reduce_calls(
        self, on: Operands, parts: Sequence[Any], payload: Any
    ) -> list[KernelCall]:
        fields = self._fields(on) | {"parts": list(parts), "payload": payload}
        fields["residual"] = on.residual
        fields["wire_scale"] = self._wire_scale(on.dtype, on.world_size)
        return [KernelCall("recast_sum", fields)]

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
        fields = self._fields(on) | {"payload": payload, "output": output}
        fields["scale"] = scale / self._wire_scale(on.dtype, on.world_size)
        fields["nonfinite"] = nonfinite
        return [KernelCall("uncast_add" if add else "uncast", fields)]

    def unbiased(self) -> bool:
        return False

    def error_bound(
        self, absmax: float, dtype: str, largest: float | None = None
    ) -> float:
        relative, smallest_normal = _ROUNDING[self.wire_dtype(dtype)]
        return relative * max(absmax, smallest_normal)

    def bits_per_element(self, dtype: str) -> float:
        return 8.0 * NBYTES[self.wire_dtype(dtype)]

    def contraction(self, dtype: str) -> float | None:
        """|x - C(x)| <= u |x| element by element, u half a unit in the last place."""
        relative, _ = _ROUNDING[self.wire_dtype(dtype)]
        return 1 - relative**2

    def _fields(self, on: Operands) -> dict[str, Any]:
        wire = self.wire_dtype(on.dtype)
        return {"spans": on.spans, "dtype": on.dtype, "wire_dtype": wire}

    def _wire_scale(self, dtype: str, world_size: int) -> float:
        """A power of two that keeps the sum of finite fp16 values finite."""
        if self.wire_dtype(dtype) != "float16":
            return 1.0
        return 2.0 ** -((world_size - 1).bit_length())


@register
@dataclass(frozen=True)
class Identity(_ElementWise):
    """No compression: elements travel as they are.

    Sums are taken in rank order in fp32 (fp64 for fp64), so that 16-bit gradients lose
    nothing before the last rounding.
    """

    name: ClassVar[str] = "identity"
    is_plain: ClassVar[bool] = True

    def wire_dtype(self, dtype: str) -> str:
        return dtype

    def unbiased(self) -> bool:
        return True

    def error_bound(
        self, absmax: float, dtype: str, largest: float | None = None
    ) -> float:
        return 0.0

    def variance_bound(self, dtype: str) -> float | None:
        return 0.0

    def contraction(self, dtype: str) -> float | None:
        return 1.0


@register
@dataclass(frozen=True)
class Cast(_ElementWise):
    """Round every element to a shorter float (to nearest, ties to even).

    Parameters
    ----------
    dtype : "bf16", "fp16" or "fp32"
        The type on the wire. Sums are taken in fp32 (fp64 for fp64 data) and rounded
        once more. A sum in fp16 travels divided by a power of two not below the world
        size, so the average of values in range is in range.
    """

    name: ClassVar[str] = "cast"
    examples: ClassVar[tuple[str, ...]] = ("cast:dtype=fp16", "cast:dtype=fp32")

    dtype: str = "bf16"

    def __post_init__(self) -> None:
        require(
            self.dtype in tuple(_WIRE),
            f"cast: dtype must be one of {', '.join(_WIRE)}, got {self.dtype!r}",
        )

    def wire_dtype(self, dtype: str) -> str:
        return _WIRE[self.dtype]
