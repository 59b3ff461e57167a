"""Tensors and arrays as raw bytes, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def as_bytes(buffer: Any) -> Bytes:
    """View a contiguous CPU tensor or array as its bytes (shape ``(nbytes,)``, uint8).

    Takes torch tensors, NumPy arrays and anything with the buffer protocol or DLPack.
    Raises TypeError for other objects and for tensors on another device, ValueError
    where the memory is not contiguous.
    """
    if isinstance(buffer, np.ndarray):
        array = buffer
    elif hasattr(buffer, "data_ptr"):
        return _tensor_bytes(buffer)
    elif hasattr(buffer, "__dlpack__"):
        array = np.from_dlpack(buffer)
    else:
        try:
            array = np.frombuffer(buffer, dtype=np.uint8)
        except TypeError:
            raise TypeError(
                "expected a CPU tensor, a NumPy array or a bytes-like object, "
                f"got {type(buffer).__name__}"
            ) from None
    if not array.dtype.isnative:
        raise ValueError(f"expected native byte order, got dtype {array.dtype.str!r}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"expected contiguous memory, got strides {array.strides} "
            f"for shape {array.shape}"
        )
    return array.reshape(-1).view(np.uint8)


def _tensor_bytes(tensor: Any) -> Bytes:
    raw: Bytes = byte_view(tensor).numpy()
    return raw


def byte_view(tensor: Any) -> Any:
    """As `as_bytes`, for tensors and as a tensor."""
    import torch

    if tensor.device.type != "cpu":
        raise TypeError(f"expected a tensor on cpu, got one on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"expected contiguous memory, got strides {tensor.stride()} "
            f"for shape {tuple(tensor.shape)}"
        )
    # A contiguous tensor of one element may have any stride, which view() refuses.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
