"""The hook's state in torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commkern.checkpoint import merge_state_dicts
from commkern.inputs import checked_int

if TYPE_CHECKING:
    from commkern.state import CompressionState


class PerRank:
    """A ``Stateful`` whose keys name the rank, made by `CompressionState.per_rank`.

    torch.distributed.checkpoint writes a plain tensor that several ranks hold under one
    key only once, from any of them. Residuals differ between ranks, so each rank's have
    a key of their own.
    """

    def __init__(self, state: CompressionState, saved_world_size: int | None) -> None:
        if saved_world_size is not None:
            checked_int("saved_world_size", saved_world_size, 1)
            here, world = state.reducer.worker.world_size, dist.get_world_size()
            if here != world:
                raise ValueError(
                    f"saved_world_size={saved_world_size} reads the states of ranks 0 "
                    f"to {saved_world_size - 1} of the default group, but this state's "
                    f"group has {here} of its {world} ranks; give "
                    "merge_state_dicts() the states of the group that you want"
                )
        self._state = state
        self._saved_world_size = saved_world_size

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under the key of this rank, or room for that of every rank
        that saved."""
        mine = self._state.state_dict()
        if self._saved_world_size is None:
            return {_key(dist.get_rank()): mine}
        return {_key(rank): _room(mine) for rank in range(self._saved_world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this rank's state, or from the mean of all that were saved.

        Raises what `CompressionState.load_state_dict` raises.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must be a dict, got {type(state_dict).__name__}"
            )
        if self._saved_world_size is None:
            mine = _key(dist.get_rank())
            if mine not in state_dict:
                raise ValueError(f"state_dict must hold {mine!r}, got {[*state_dict]}")
            self._state.load_state_dict(state_dict[mine])
        else:
            self._state.load_state_dict(merge_state_dicts(state_dict.values()))


def _key(rank: int) -> str:
    return f"rank_{rank}"


def _room(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _room(inner) for key, inner in value.items()}
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value
