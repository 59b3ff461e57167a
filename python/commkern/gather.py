"""A few figures of every rank, seen by all: what decisions in common rest on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commkern.compose import Settings
from commkern.compressors import Identity
from commkern.groups import GroupWorker
from commkern.layout import Member


def gather(worker: GroupWorker, figures: Sequence[float], step: int) -> torch.Tensor:
    """``figures`` of each rank: fp64, (world_size, len(figures)), equal everywhere.

    All ranks call it at the same place, inside a job of the worker, with the same
    number of finite figures. A sum in which each rank fills its own row is exact.
    """
    table = torch.zeros(worker.world_size, len(figures), dtype=torch.float64)
    table[worker.rank] = torch.tensor(figures, dtype=torch.float64)
    member = Member("figures", table.numel(), 0, Identity())
    plan = worker.plan([member], "float64", Settings(op="sum"))
    worker.run(plan, table.view(-1), seed=0, step=step)
    return table
