"""The kernels in NumPy: same names, same arguments and same bits as the compiled ones.

``commkern.kernels.<name>`` and ``commkern.reference.<name>`` take the same keyword
arguments, the fields of the argument structs in csrc/kernels, and write the same bytes
(a NaN that arithmetic made may differ in its sign and low bits).
"""

from __future__ import annotations

from typing import Any

from commkern.reference.cast import cast, recast_sum, uncast, uncast_add
from commkern.reference.feedback import (
    accumulate,
    residual_scale,
    residual_subtract,
)
from commkern.reference.fixed_point import (
    block_exponents,
    fixed_dequantize,
    fixed_dequantize_add,
    fixed_quantize,
    fixed_sum,
    max_exponents,
)
from commkern.reference.hadamard import hadamard
from commkern.reference.layout import Kernel
from commkern.reference.quantize import (
    dequantize,
    dequantize_add,
    quantize,
    requantize_sum,
)
from commkern.reference.reduce import (
    absmax,
    nonfinite_check,
    nonzero_check,
    saturate,
    sum,
)

# In the order of csrc/kernels/kernel_table.h.
KERNELS = [
    "quantize",
    "dequantize",
    "dequantize_add",
    "requantize_sum",
    "cast",
    "uncast",
    "uncast_add",
    "recast_sum",
    "residual_subtract",
    "residual_scale",
    "accumulate",
    "block_exponents",
    "max_exponents",
    "fixed_quantize",
    "fixed_sum",
    "fixed_dequantize",
    "fixed_dequantize_add",
    "sum",
    "absmax",
    "nonfinite_check",
    "nonzero_check",
    "saturate",
    "hadamard",
]

__all__ = [
    "KERNELS",
    "absmax",
    "accumulate",
    "block_exponents",
    "cast",
    "dequantize",
    "dequantize_add",
    "fixed_dequantize",
    "fixed_dequantize_add",
    "fixed_quantize",
    "fixed_sum",
    "hadamard",
    "kernel_signatures",
    "max_exponents",
    "nonfinite_check",
    "nonzero_check",
    "quantize",
    "recast_sum",
    "requantize_sum",
    "residual_scale",
    "residual_subtract",
    "saturate",
    "sum",
    "uncast",
    "uncast_add",
]


def kernel_signatures() -> dict[str, dict[str, Any]]:
    """Every kernel's fields, in order, with their defaults (``...``: none)."""
    kernels: dict[str, Kernel[...]] = {name: globals()[name] for name in KERNELS}
    return {name: dict(kernel.fields) for name, kernel in kernels.items()}
