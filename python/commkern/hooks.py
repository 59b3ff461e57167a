# DDP reads this function's signature: no postponed annotations in this module.
"""The DDP communication hook: one generic hook serves every compressor."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commkern.admission import check_call, unwrapped
from commkern.state import CompressionState


def compression_hook(
    state: CompressionState,
    bucket: dist.GradBucket = None,  # type: ignore[name-defined]
    *others: Any,
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks through the state's compressor.

    ``ddp.register_comm_hook(state, commkern.compression_hook)``; never blocks backward.
    Failures (PeerLost, MismatchError, ...) are raised by ``backward()`` as themselves.
    A sparse gradient (of an embedding with ``sparse=True``) travels uncompressed, the
    rows that any rank has; it becomes a coalesced tensor of those. TypeError for
    another caller than DDP (FSDP passes other arguments).
    """
    check_call(state, bucket, others, CompressionState)
    return state.reducer.submit(bucket)


def register(
    ddp: DistributedDataParallel, compressor: Any = "quantize:bits=8", **settings: Any
) -> CompressionState:
    """Make DDP reduce its gradients through a compressor; returns the state.

    ``ddp`` may be wrapped by ``torch.compile``. ``settings`` are those of
    `CompressionState`. Raises TypeError for anything but a DistributedDataParallel
    module, and what `CompressionState` raises.
    """
    ddp = unwrapped(ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp must be a DistributedDataParallel module, got {type(ddp).__name__}; "
            "FSDP has another hook contract, which this hook "
            "does not serve"
        )
    settings.setdefault("process_group", ddp.process_group)
    state = CompressionState(compressor=compressor, module=ddp, **settings)
    ddp.register_comm_hook(state, compression_hook)
    return state
