"""Saving and loading the hook's state: tensors and plain values, keyed by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from commkern.compose import Settings
from commkern.compressors import Identity
from commkern.delayed import check_pending, load_pending, saved_pending
from commkern.groups import GroupWorker
from commkern.layout import Member
from commkern.residuals import ResidualStore

if TYPE_CHECKING:
    from commkern.state import CompressionState

FORMAT = 1
_ANY_RANK = -1


def state_dict(state: CompressionState) -> dict[str, Any]:
    """What `CompressionState.state_dict` returns."""
    state.wait()
    worker = state.reducer.worker
    return _header(state, worker.rank, worker.world_size) | {
        key: {name: store[name].clone() for name in store.names()}
        for key, store in state.reducer.stores.items()
    }


def full_state_dict(state: CompressionState) -> dict[str, Any]:
    """The mean of all ranks' residuals, the same on every rank."""
    state.wait()
    means = {
        key: _mean_over_ranks(state, store)
        for key, store in state.reducer.stores.items()
    }
    return _header(state, _ANY_RANK, state.reducer.worker.world_size) | means


def _mean_over_ranks(
    state: CompressionState, store: ResidualStore
) -> dict[str, torch.Tensor]:
    worker, step, names = state.reducer.worker, state.step, store.names()
    flat = torch.cat([store[name] for name in names] or [torch.zeros(0)])
    member = Member("residuals", flat.numel(), 0, Identity())

    def mean() -> None:
        plan = worker.plan([member], "float32", Settings(op="avg"))
        worker.run(plan, flat, seed=0, step=step)

    worker.call(mean)
    pieces = torch.split(flat, [store[name].numel() for name in names])
    return {name: piece.clone() for name, piece in zip(names, pieces, strict=True)}


def _header(state: CompressionState, rank: int, world_size: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "step": state.step,
        "compressor": str(state.compressor),
        "feedback": str(state.feedback),
        "loss_scale": state.reducer.loss_scale,
    } | saved_pending(state.reducer.delay)


def load_state_dict(
    state: CompressionState, saved: dict[str, Any], *, strict: bool
) -> None:
    """What `CompressionState.load_state_dict` does; nothing changes if it raises."""
    if not isinstance(saved, dict):
        raise TypeError(f"expected a state_dict, got {type(saved).__name__}")
    _same("format", FORMAT, saved.get("format"))
    _check_values(saved)
    if saved["rank"] != _ANY_RANK:
        _check_place(state.reducer.worker, saved)
    if strict:
        _same("compressor", str(state.compressor), saved["compressor"])
        _same("feedback", str(state.feedback), saved["feedback"])
    for key, store in state.reducer.stores.items():
        _check_store(key, store, saved.get(key), strict=strict)
    check_pending(state.reducer.delay, saved, strict=strict)
    state.step = saved["step"]
    state.reducer.loss_scale = saved["loss_scale"]
    load_pending(state.reducer.delay, saved)
    for key, store in state.reducer.stores.items():
        for name in store.names():
            held = saved.get(key, {}).get(name)
            view = store[name]
            view.zero_() if held is None else view.copy_(held)


def _check_values(saved: dict[str, Any]) -> None:
    step = saved.get("step")
    if not isinstance(step, int) or not 0 <= step < 2**63:
        raise ValueError(f"step of the saved state must be 0 or more, got {step!r}")


def _check_place(worker: GroupWorker, saved: dict[str, Any]) -> None:
    here = (worker.rank, worker.world_size)
    there = (saved["rank"], saved["world_size"])
    if here != there:
        raise ValueError(
            f"this is rank {here[0]} of {here[1]}, the state is that of rank "
            f"{there[0]} of {there[1]}; save full_state_dict() to load it elsewhere"
        )


def _check_store(key: str, store: ResidualStore, saved: Any, *, strict: bool) -> None:
    if saved is None and not strict:
        return
    if not isinstance(saved, dict):
        raise TypeError(f"{key} of the saved state must be a dict, got {saved}")
    known = set(store.names())
    missing, unexpected = sorted(known - set(saved)), sorted(set(saved) - known)
    if strict and (missing or unexpected):
        raise ValueError(
            f"{key}: parameters differ: missing in the saved state {missing}, "
            f"unexpected {unexpected}"
        )
    for name in known & set(saved):
        _same(
            f"elements of {name!r}",
            store[name].numel(),
            saved[name].numel(),
        )


def _same(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ValueError(f"{what}: this state has {expected!r}, the saved one {got!r}")
