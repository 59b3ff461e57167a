"""Element types: torch's own and the names that commkern uses for them."""

from __future__ import annotations

from typing import Final

import torch

from commkern.wire.dtypes import CODES

_FROM_TORCH: Final = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TO_TORCH: Final = {name: dtype for dtype, name in _FROM_TORCH.items()}


def dtype_name(dtype: torch.dtype, compressor: object = None) -> str:
    """``torch.float32`` to ``"float32"``; TypeError names the compressor, if there is
    one, and lists what is supported."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        coder = "" if compressor is None else f"compressor {compressor}: "
        raise TypeError(
            f"{coder}dtype {dtype} is not supported; supported: {', '.join(CODES)} "
            "(complex tensors as pairs of reals)"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` to ``torch.float32``."""
    return _TO_TORCH[name]
