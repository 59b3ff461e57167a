"""The DDP module behind a state that was made for the bare model."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commkern.admission import check_ddp
from commkern.groups import GroupWorker
from commkern.watch import LOG

_SHOWN = 16


def check_owner(
    state: ReferenceType[Any], worker: GroupWorker, parameters: Iterable[torch.Tensor]
) -> None:
    """ValueError where DDP reduces these parameters over other ranks than the worker,
    and what `admission.check_ddp` raises.

    Every rank would get a wrong average, without a sign: messages of other ranks look
    alike. Goes through all objects that the garbage collector knows: for one call.
    """
    group = getattr(worker.transport, "group", None)
    if group is None:  # threads, with which there is no DDP
        return
    owners = _owners(state(), parameters)
    if not owners and gc.get_freeze_count():
        LOG.warning(
            "a state made for the bare model cannot find DDP after gc.freeze(), and "
            "reduces over %s whatever DDP's group is; pass the DDP module as module=",
            _text(dist.get_process_group_ranks(group)),
        )
    for ddp in owners:
        check_ddp(ddp)
    mine = dist.get_process_group_ranks(group)
    reduced = [dist.get_process_group_ranks(ddp.process_group) for ddp in owners]
    if reduced and mine not in reduced:
        raise ValueError(
            f"this state, made for the bare model, reduces over {_text(mine)}, but DDP "
            f"over {_text(reduced[-1])}: pass the DDP module as module=, or its group "
            "as process_group="
        )


def _text(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = ", ..." if len(ranks) > _SHOWN else ""
    return f"{len(ranks)} ranks ({shown}{more})"


def _owners(
    state: Any, parameters: Iterable[torch.Tensor]
) -> list[DistributedDataParallel]:
    """The DDP modules that hold one of these parameters: those that the state is
    registered with, if any is."""
    ids = set(map(id, parameters))
    found = [ddp for ddp in _modules() if not ids.isdisjoint(map(id, ddp.parameters()))]
    registered = [
        ddp
        for ddp in found
        if any(held is state for _, held in getattr(ddp, "_comm_hooks", ()))
    ]
    return registered or found


def _modules() -> list[DistributedDataParallel]:
    known = gc.get_objects()
    kinds = set(map(type, known))
    ours = {kind for kind in kinds if issubclass(kind, DistributedDataParallel)}
    found = [item for item in known if type(item) in ours] if ours else []
    # One that is being made has no parameters yet, a collected one none any more.
    return [ddp for ddp in found if "_parameters" in vars(ddp)]
