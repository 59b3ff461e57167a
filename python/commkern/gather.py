"""What ranks see of each other outside of the buckets: a few figures, or a mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commkern.compose import Settings
from commkern.compressors import Identity
from commkern.dtypes import dtype_name
from commkern.groups import GroupWorker
from commkern.layout import Member


def gather(worker: GroupWorker, figures: Sequence[float], step: int) -> torch.Tensor:
    """``figures`` of each rank: fp64, (world_size, len(figures)), equal everywhere.

    All ranks call it at the same place, inside a job of the worker, with the same
    number of finite figures. A sum in which each rank fills its own row is exact.
    """
    table = torch.zeros(worker.world_size, len(figures), dtype=torch.float64)
    table[worker.rank] = torch.tensor(figures, dtype=torch.float64)
    _reduce(worker, "figures", table.view(-1), "sum", step)
    return table


def mean_over_ranks(
    worker: GroupWorker, step: int, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The mean of each of these flat tensors of one dtype, fp32 or fp64.

    Collective; the same bits on every rank.
    """
    if not tensors:
        return []

    def reduced() -> torch.Tensor:
        with worker.or_tell(step):
            flat = torch.cat(list(tensors))
            _reduce(worker, "mean", flat, "avg", step)
        return flat

    flat = worker.call(reduced)
    return list(torch.split(flat, [tensor.numel() for tensor in tensors]))


def _reduce(
    worker: GroupWorker, name: str, flat: torch.Tensor, op: str, step: int
) -> None:
    """Uncompressed and in place; inside a job of the worker."""
    member = Member(name, flat.numel(), 0, Identity())
    plan = worker.plan([member], dtype_name(flat.dtype), Settings(op=op))
    worker.run(plan, flat, seed=0, step=step)
