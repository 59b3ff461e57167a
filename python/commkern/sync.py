"""Whether all ranks hold the same bits: a collective that names what does not."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from commkern.admission import plain_name
from commkern.errors import ReplicasDiffer
from commkern.inputs import checked_bool

_DIGEST_NBYTES = 16
Entries = dict[str, tuple[str, bytes]]  # name -> (what it is, hash of its bits)


def check_sync(
    module: torch.nn.Module,
    group: Any = None,
    *,
    gradients: bool = False,
    buffers: bool = True,
) -> None:
    """Check that every rank's parameters and buffers are equal in bits.

    Collective: every rank of the group calls it, between two steps. One all_gather of
    16 bytes where ranks agree; a second one, of some 100 bytes per tensor, finds out
    what differs where they do not.

    Parameters
    ----------
    module : a DistributedDataParallel module, or any other
        Parameters and buffers that DDP was told to ignore are left out.
    group : a process group; None: that of the DDP module, or else the default group
    gradients : compare the gradients, too; right after ``backward()``
    buffers : compare the buffers
        With ``broadcast_buffers`` DDP makes them equal in the next forward pass, and
        until then those that depend on the batch (running means) differ.

    Names, shapes, dtypes, layouts and bits are compared: -0.0 is not 0.0, and a NaN
    equals the same NaN only. Strides and devices may differ. Sparse tensors are
    compared by their coalesced indices and values; tensors on "meta" by shape and dtype
    alone.

    Raises `ReplicasDiffer` on every rank, naming the first tensor that differs and the
    ranks that hold something else than most; TypeError for tensors whose bits cannot be
    read (quantized, nested); ValueError where this rank is no member of the group.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}"
        )
    checked_bool("gradients", gradients)
    checked_bool("buffers", buffers)
    if group is None and isinstance(module, DistributedDataParallel):
        group = module.process_group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a process group or None, got {type(group).__name__}"
        )
    mine = {
        name: (_kind(tensor), _hash(name, tensor))
        for name, tensor in _tensors(module, gradients, buffers)
    }
    together = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16)
    if _all_equal(together.digest(), group):
        return
    held: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, mine, group)
    _raise_first_difference(held)


# --- what is compared -----------------------------------------------------------------


def _tensors(
    module: torch.nn.Module, gradients: bool, buffers: bool
) -> Iterator[tuple[str, torch.Tensor | None]]:
    ignored: set[str] = set()
    if isinstance(module, DistributedDataParallel):
        ignored = set(module.parameters_to_ignore)
        module = module.module
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    for name, parameter in named:
        yield f"parameter {plain_name(name)!r}", parameter
    if buffers:
        for name, buffer in module.named_buffers():
            if name not in ignored:
                yield f"buffer {plain_name(name)!r}", buffer
    if gradients:
        for name, parameter in named:
            yield f"gradient of {plain_name(name)!r}", parameter.grad


def _kind(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    if is_lazy(tensor):
        return "not initialized"
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    return kind if tensor.layout == torch.strided else f"{kind} {tensor.layout}"


def _hash(name: str, tensor: torch.Tensor | None) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    try:
        for dense in _dense_parts(tensor):
            state.update(_bits(dense))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise TypeError(
            f"check_sync cannot read the bits of {name}, a {type(tensor).__name__} of "
            f"layout {getattr(tensor, 'layout', None)}: {error}"
        ) from error
    return state.digest()


def _dense_parts(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    """The dense tensors that hold all values."""
    if tensor is None or tensor.is_meta:
        return []
    if is_lazy(tensor):
        return []
    if tensor.is_quantized:  # its integers alone would say nothing of its scales
        raise TypeError("quantized")
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _bits(tensor: torch.Tensor) -> Any:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


# --- what ranks tell each other -------------------------------------------------------


def _all_equal(digest: bytes, group: Any) -> bool:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group)
    return all(torch.equal(mine, other) for other in every)


def _raise_first_difference(held: list[Entries]) -> None:
    names = dict.fromkeys(name for entries in held for name in entries)
    differing = [n for n in names if len({entries.get(n) for entries in held}) > 1]
    name = differing[0]
    holders: defaultdict[tuple[str, bytes] | None, list[int]] = defaultdict(list)
    for rank, entries in enumerate(held):
        holders[entries.get(name)].append(rank)
    groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    (_, most), (_, second), *_ = groups
    tied = len(most) == len(second)
    drifted = sorted(r for _, ranks in groups[not tied :] for r in ranks)
    kinds = [(entry[0] if entry else "missing", ranks) for entry, ranks in groups]
    if len({kind for kind, _ in kinds}) > 1:
        what = "; ".join(f"{kind} at {_ranks(ranks)}" for kind, ranks in kinds)
    elif tied:
        what = " and ".join(_ranks(ranks) for _, ranks in groups) + " differ"
    else:
        what = f"{_ranks(drifted)} of {len(held)} drifted from the others"
    raise ReplicasDiffer(
        f"replicas differ in {name}: {what} ({len(differing)} of {len(names)} tensors "
        "differ)",
        name=name,
        ranks=tuple(drifted),
    )


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
