"""Element types: names, sizes and codes of the wire, and torch's own types."""

from __future__ import annotations

from typing import Final

import torch

# Mirrors ``enum class DType`` of csrc/core/types.h.
CODE: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
ITEMSIZE: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

_FROM_TORCH: Final = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TO_TORCH: Final = {name: dtype for dtype, name in _FROM_TORCH.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` to ``"float32"``; TypeError lists what is supported."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise TypeError(
            f"dtype {dtype} is not supported; supported: {', '.join(CODE)} "
            "(complex tensors as pairs of reals)"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` to ``torch.float32``."""
    return _TO_TORCH[name]


def compute_nbytes(dtype: str) -> int:
    """Bytes of the type that arithmetic on ``dtype`` is done in."""
    return 8 if dtype == "float64" else 4
