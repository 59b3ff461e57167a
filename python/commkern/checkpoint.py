"""Saving and loading the hook's state: tensors and plain values, keyed by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from commkern.auto import AutoChoice
from commkern.compose import Settings
from commkern.compressors import Identity
from commkern.groups import GroupWorker
from commkern.layout import Member

if TYPE_CHECKING:
    from commkern.state import CompressionState

FORMAT = 1
_ANY_RANK = -1


def state_dict(state: CompressionState) -> dict[str, Any]:
    """What `CompressionState.state_dict` returns."""
    residuals = state.residuals
    return _header(
        state, state.reducer.worker.rank, state.reducer.worker.world_size
    ) | {
        "residuals": {name: residuals[name].clone() for name in residuals.names()},
    }


def full_state_dict(state: CompressionState) -> dict[str, Any]:
    """The mean of all ranks' residuals, the same on every rank."""
    worker, residuals = state.reducer.worker, state.residuals
    names = residuals.names()
    flat = torch.cat([residuals[name] for name in names] or [torch.zeros(0)])
    member = Member("residuals", flat.numel(), 0, Identity())
    step = state.step

    def mean() -> None:
        plan = worker.plan([member], "float32", Settings(op="avg"))
        worker.run(plan, flat, seed=0, step=step)

    worker.call(mean)
    pieces = torch.split(flat, [residuals[name].numel() for name in names])
    means = {name: piece.clone() for name, piece in zip(names, pieces, strict=True)}
    return _header(state, _ANY_RANK, worker.world_size) | {"residuals": means}


def _header(state: CompressionState, rank: int, world_size: int) -> dict[str, Any]:
    auto = state.compressor if isinstance(state.compressor, AutoChoice) else None
    return {
        "auto": auto.state_dict(any_rank=rank == _ANY_RANK) if auto else None,
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "step": state.step,
        "compressor": str(state.compressor),
        "feedback": str(state.feedback),
        "loss_scale": state.reducer.loss_scale,
    }


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
    _check_residuals(state, saved["residuals"], strict=strict)
    state.step = saved["step"]
    state.reducer.loss_scale = saved["loss_scale"]
    if isinstance(state.compressor, AutoChoice):
        state.compressor.load_state_dict(saved.get("auto"), state.step)
    for name in state.residuals.names():
        held = saved["residuals"].get(name)
        view = state.residuals[name]
        view.zero_() if held is None else view.copy_(held)


def _check_values(saved: dict[str, Any]) -> None:
    step, residuals = saved.get("step"), saved.get("residuals")
    if not isinstance(step, int) or not 0 <= step < 2**63:
        raise ValueError(f"step of the saved state must be 0 or more, got {step!r}")
    if not isinstance(residuals, dict):
        raise TypeError(f"residuals of the saved state must be a dict, got {residuals}")


def _check_place(worker: GroupWorker, saved: dict[str, Any]) -> None:
    here = (worker.rank, worker.world_size)
    there = (saved["rank"], saved["world_size"])
    if here != there:
        raise ValueError(
            f"this is rank {here[0]} of {here[1]}, the state is that of rank "
            f"{there[0]} of {there[1]}; save full_state_dict() to load it elsewhere"
        )


def _check_residuals(
    state: CompressionState, saved: dict[str, torch.Tensor], *, strict: bool
) -> None:
    known = set(state.residuals.names())
    missing, unexpected = sorted(known - set(saved)), sorted(set(saved) - known)
    if strict and (missing or unexpected):
        raise ValueError(
            f"parameters differ: missing in the saved state {missing}, "
            f"unexpected {unexpected}"
        )
    for name in known & set(saved):
        _same(
            f"elements of {name!r}",
            state.residuals[name].numel(),
            saved[name].numel(),
        )


def _same(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ValueError(f"{what}: this state has {expected!r}, the saved one {got!r}")
