"""What the DDP hook refuses: at registration, or where only a call can tell, then."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_FSDP = (
    "FSDP has another hook contract: it hands its hooks tensors, not buckets, and "
    "divides by itself. This hook serves DistributedDataParallel only; under FSDP2, "
    "commkern.all_reduce can be called in a function given to set_all_reduce_hook"
)
_PYTHON_REDUCER = (
    "optimize_ddp='python_reducer' of torch._dynamo.config hands hooks pairs of "
    "gradient and parameter, not buckets; make the DDP module under 'ddp_optimizer' "
    "or 'no_optimization'"
)


def unwrapped(module: Any) -> Any:
    """The module that ``torch.compile`` was given, or the module itself."""
    return getattr(module, "_orig_mod", module)


def plain_name(name: str) -> str:
    """The name of a parameter or buffer without what ``torch.compile`` adds to it."""
    return name.replace("_orig_mod.", "")


def check_module(module: Any) -> None:
    """Raise TypeError or ValueError, with advice, for a module whose gradients never
    reach the hook in buckets."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}"
        )
    for part in module.modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise TypeError(f"module holds a {type(part).__name__}; {_FSDP}")
    if isinstance(module, DistributedDataParallel):
        _check_ddp(module)


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise TypeError(_PYTHON_REDUCER)
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "DDP was made with skip_all_reduce_unused_params=True, so that the hook "
            "may not be called for the last bucket of a step; the hook serves "
            "find_unused_parameters=True and static_graph=True"
        )
    policy = getattr(ddp, "mixed_precision", None)
    if policy is not None:
        raise ValueError(
            f"DistributedDataParallel(mixed_precision={policy}) has a communication "
            "hook of its own, and DDP takes one only; use torch.autocast instead"
        )


def check_call(state: Any, bucket: Any, others: tuple[Any, ...], kind: type) -> None:
    """Raise TypeError, with advice, where the hook was not called by DDP's reducer.

    ``kind`` is the class of the state that the hook serves.
    """
    tensors = any(isinstance(x, torch.Tensor) for x in (state, bucket, *others))
    if tensors:
        raise TypeError(_FSDP)
    if isinstance(bucket, tuple):
        raise TypeError(_PYTHON_REDUCER)
    if others or not isinstance(state, kind) or not hasattr(bucket, "buffer"):
        got = ", ".join(type(x).__name__ for x in (state, bucket, *others))
        raise TypeError(
            f"the hook takes a {kind.__name__} and a bucket, got ({got}): "
            "ddp.register_comm_hook(state, commkern.compression_hook)"
        )
