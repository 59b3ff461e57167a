"""What all block quantisers share: everything follows from their format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

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
from commkern.formats import BLOCK_SIZES, ROUNDINGS, Format

#: Names of scale types in compressors' parameters -> in formats.
SCALE_DTYPES = {
    "fp32": "compute",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e8m0": "e8m0",
}


class BlockCoder(Compressor):
    """Elements become codes of a few bits in units of their block's scale.

    A subclass says which format and which rounding; sums are taken in rank order in
    fp32 (fp64 for fp64 data) and coded again. csrc/kernels/quantize.h states the
    arithmetic to the bit.
    """

    aggregation: ClassVar[Aggregation] = "hop"

    def block_format(self) -> Format:
        """How elements and scales are stored."""
        raise NotImplementedError

    def code_rounding(self) -> str:
        """How values become codes: "nearest" or "stochastic"."""
        raise NotImplementedError

    # --- size and layout ----------------------------------------------------------

    def body_nbytes(self, length: int, dtype: str) -> int:
        return self.block_format().body_nbytes(length, dtype)

    def alignment(self, dtype: str) -> int:
        return self.block_format().alignment(dtype)

    def granule(self, dtype: str) -> int:
        return self.block_format().unit

    @property
    def whole_shares(self) -> bool:
        return self.block_format().has_head

    # --- composition of kernels ---------------------------------------------------

    def compress_calls(self, on: Operands, data: Any, payload: Any) -> list[KernelCall]:
        fields = self._coding(on, self.block_format())
        return [KernelCall("quantize", fields | {"input": data, "payload": payload})]

    def reduce_calls(
        self, on: Operands, parts: Sequence[Any], payload: Any
    ) -> list[KernelCall]:
        fmt = self._format_of_sum(len(parts), on.dtype)
        fields = self._coding(on, fmt) | {"parts": list(parts), "payload": payload}
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
        fields = self._operands(on, self.block_format())
        fields |= {"payload": payload, "output": output}
        fields |= {"scale": scale, "nonfinite": nonfinite}
        return [KernelCall("dequantize_add" if add else "dequantize", fields)]

    def _format_of_sum(self, parts: int, dtype: str) -> Format:
        """A constant scale grows with the number of ranks, as their sum does."""
        fmt = self.block_format()
        if fmt.statistic != "constant":
            return fmt
        compute = np.float64 if dtype == "float64" else np.float32
        total = one = compute(fmt.constant)
        for _ in range(parts - 1):
            total = total + one
        return dataclasses.replace(fmt, constant=float(total))

    def _operands(self, on: Operands, fmt: Format) -> dict[str, Any]:
        return {"spans": on.spans, "dtype": on.dtype} | fmt.fields()

    def _coding(self, on: Operands, fmt: Format) -> dict[str, Any]:
        return self._operands(on, fmt) | {
            "residual": on.residual,
            "rounding": self.code_rounding(),
            "seed": on.seed,
            "step": on.step,
            "stream": stream(PURPOSE_ROUNDING, 0, on.who),
        }

    # --- traits -------------------------------------------------------------------

    def unbiased(self) -> bool:
        return self.code_rounding() == "stochastic"

    def error_bound(
        self, absmax: float, dtype: str, largest: float | None = None
    ) -> float:
        whole = absmax if largest is None else largest
        fmt = self.block_format()
        return bounds.error(fmt, self.code_rounding(), absmax, whole, dtype)

    def bits_per_element(self, dtype: str) -> float:
        return self.block_format().bits_per_element(dtype)

    def variance_bound(self, dtype: str) -> float | None:
        if not self.unbiased():
            return None
        return bounds.variance(self.block_format())

    def contraction(self, dtype: str) -> float | None:
        if self.unbiased():
            return None
        return bounds.contraction(self.block_format(), dtype)


# --- checks of parameters -------------------------------------------------------------


def check_int(name: str, field: str, value: object, least: int, most: int) -> None:
    """TypeError or ValueError, with the range, for anything but an int in it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: {field} must be an int, got {value!r}")
    allowed = f"{least}" if least == most else f"{least} to {most}"
    require(least <= value <= most, f"{name}: {field} must be {allowed}, got {value}")


def check_choice(name: str, field: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError, with what is allowed, for anything else."""
    require(
        isinstance(value, str) and value in allowed,
        f"{name}: {field} must be one of {', '.join(allowed)}, got {value!r}",
    )


def check_rounding(name: str, value: object) -> None:
    check_choice(name, "rounding", value, ROUNDINGS)


def check_block_size(name: str, value: object, *, optional: bool = False) -> None:
    """An allowed block size; None, too, where ``optional``."""
    if optional and value is None:
        return
    allowed = "an int or None" if optional else "an int"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: block_size must be {allowed}, got {value!r}")
    least, most = BLOCK_SIZES
    require(
        least <= value <= most and value % 8 == 0,
        f"{name}: block_size must be a multiple of 8 from {least} to {most}, "
        f"got {value}",
    )


def scales_for(name: str, block_size: int | None, scale_dtype: str) -> str:
    """The format's scales; ValueError for a scale per parameter that is not fp32."""
    if block_size is not None:
        return SCALE_DTYPES[scale_dtype]
    require(
        scale_dtype == "fp32",
        f"{name}: scale_dtype must be fp32 with block_size=None, got {scale_dtype!r}",
    )
    return "span"


def blocks(block_size: int | None) -> int:
    """The format's block size; for one scale per parameter that of the layout."""
    return Format.block_size if block_size is None else block_size
