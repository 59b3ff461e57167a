"""Checks of what users pass, with both values in the text."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist

from commkern.compressors import Compressor
from commkern.dtypes import dtype_name
from commkern.feedback import Feedback

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


def reduce_op(op: Any) -> str:
    """``ReduceOp.SUM`` or ``AVG`` to its name; ValueError for every other one."""
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):  # 0 is equal to SUM
        for known, name in _OPS.items():
            if op == known:
                return name
    raise ValueError(f"op must be ReduceOp.SUM or ReduceOp.AVG, got {op}")


def real_view(tensor: Any, compressor: object = None) -> torch.Tensor:
    """A tensor that kernels can work on; complex ones as pairs of reals.

    Raises TypeError for what is not a dense CPU tensor of a supported dtype, in whose
    text ``compressor`` is what was to code it.
    """
    given = checked_tensor("tensor", tensor)
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a dense (strided) tensor, got {tensor.layout}")
    if tensor.device.type != "cpu":
        raise TypeError(
            f"tensor is on {tensor.device}, but this build reduces CPU tensors only: "
            "the compiled CUDA module does not hold the kernels of this call "
            "(`commkern doctor` shows what is built)"
        )
    real = given.detach().resolve_neg()
    if real.is_complex():
        real = torch.view_as_real(real.resolve_conj())
    dtype_name(real.dtype, compressor)
    return real


def real_numel(tensor: torch.Tensor) -> int:
    """The number of reals in a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def checked_seed(seed: Any, what: str = "seed") -> int:
    """What keys random draws: ValueError for anything but an int of 64 bits, not
    negative."""
    if not _is_int(seed) or not 0 <= seed < 2**64:
        raise ValueError(f"{what} must be an int from 0 to 2**64 - 1, got {seed!r}")
    return int(seed)


def check_writable(tensor: torch.Tensor) -> None:
    """ValueError for an expanded tensor, whose elements share memory."""
    shared = (
        stride == 0 and size > 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    if any(shared):
        raise ValueError(
            "cannot write into an expanded tensor: shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}"
        )


def checked_name(name: Any) -> str:
    """A parameter's name: a string that UTF-8 can hold; None is the empty name."""
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"name {name!r} is not valid text: {error}") from None
    return name


def check_feedback(coder: Compressor, feedback: Feedback | None) -> None:
    """ValueError for error feedback around a compressor that allows none."""
    if feedback is not None and not coder.supports_feedback:
        raise ValueError(
            f"compressor {coder} allows no error feedback: feedback must be None, "
            f"got {str(feedback)!r}"
        )


def check_rollback(feedback: Feedback | None, rollback: bool) -> None:
    """ValueError where feedback needs two versions of its state and gets one."""
    if feedback is not None and feedback.needs_rollback and not rollback:
        raise ValueError(
            f"feedback {str(feedback)!r} needs rollback=True, got False: a step "
            "that is spoilt in place would leave results and residuals apart for ever"
        )


def check_owing(feedback: Feedback | None) -> None:
    """ValueError where residuals are not what is owed, and follow no learning rate."""
    if feedback is not None and feedback.accumulates:
        raise ValueError(
            "learning_rate= rescales what error feedback still owes, and "
            f"{str(feedback)!r} owes nothing: learning_rate must be None with it"
        )


def checked_int(what: str, value: Any, least: int, below: float = math.inf) -> int:
    """ValueError for anything but an int from ``least`` on, and below ``below``."""
    if not _is_int(value) or not least <= value < below:
        raise ValueError(f"{what} must be an int, {least} or more, got {value!r}")
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def checked_number(what: str, value: Any) -> float:
    """An int or a finite float; ValueError for anything else."""
    if not _is_int(value) and not (isinstance(value, float) and math.isfinite(value)):
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    return cast(float, value)


def checked_tensor(what: str, value: Any) -> torch.Tensor:
    """TypeError for anything but a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(value).__name__}")
    return value


def checked_bool(what: str, value: Any) -> bool:
    """TypeError for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r}")
    return value
