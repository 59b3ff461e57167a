"""The memory that plans work in besides the caller's."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from commkern.arrays import Bytes, as_bytes
from commkern.plan import EXTERNAL, Plan, Slice


class Workspace:
    """Named byte buffers that grow to what the largest plan needs."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._views: weakref.WeakKeyDictionary[Plan, Views] = (
            weakref.WeakKeyDictionary()
        )

    def views(self, plan: Plan) -> Views:
        """The plan's workspace, as tensors and as arrays; contents are not kept."""
        found = self._views.get(plan)
        if found is None:
            sizes = {k: v for k, v in plan.buffers.items() if k not in EXTERNAL}
            self._grow(sizes)
            tensors = {name: self._tensors[name][:size] for name, size in sizes.items()}
            arrays = {name: as_bytes(tensor) for name, tensor in tensors.items()}
            found = self._views[plan] = Views(tensors, arrays)
        return found

    def _grow(self, sizes: dict[str, int]) -> None:
        for name, nbytes in sizes.items():
            held = self._tensors.get(name)
            if held is None or held.numel() < nbytes:
                self._tensors[name] = torch.zeros(nbytes, dtype=torch.uint8)
                self._views.clear()


@dataclass(frozen=True)
class Views:
    """One plan's workspace: the same memory as tensors and as arrays, and slices of it
    that were asked for."""

    tensors: dict[str, torch.Tensor]
    arrays: dict[str, Bytes]
    slices: dict[Slice, torch.Tensor] = field(default_factory=dict)


class Movable:
    """What the messages of one run are made of, as bytes: "data" and the workspace."""

    def __init__(self, data: torch.Tensor, workspace: Views) -> None:
        self._tensors = workspace.tensors | {"data": data}
        self._slices = workspace.slices

    def __getitem__(self, buffer: str) -> torch.Tensor:
        return self._tensors[buffer]

    def view(self, piece: Slice) -> torch.Tensor:
        """The bytes of a slice."""
        found = self._slices.get(piece)
        if found is None:
            whole = self._tensors[piece.buffer]
            found = whole[piece.offset : piece.offset + piece.nbytes]
            if piece.buffer != "data":  # another one in the next run
                self._slices[piece] = found
        return found
