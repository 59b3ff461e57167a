"""Tensors by parameter name, in two versions: one committed, one that the running step
writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from commkern.wire.message import align

_ALIGNED_ELEMENTS = 16  # 64 bytes: kernels stream past the cache only to such places


class ResidualStore:
    """What a state keeps for each parameter; residuals are in units of the sum over
    ranks.

    With ``rollback`` a step reads the committed version of each parameter and writes
    the other one; ``commit`` swaps them, per parameter, without a copy. Without it
    there is one version, updated in place.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        rollback: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rollback = rollback
        self.dtype = dtype
        self._sizes: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        nothing = torch.zeros(0, dtype=dtype)
        self._versions = (nothing, nothing)
        self.committed = torch.zeros(0, dtype=torch.uint8)
        self._last: list[int] | None = None
        self.extend(sizes)

    def extend(self, sizes: Mapping[str, int]) -> None:
        """Add parameters with zero residuals; what is there keeps its values."""
        start = self._versions[0].numel()
        for name, size in sizes.items():
            start = align(start, _ALIGNED_ELEMENTS)
            self._offsets[name] = start
            self._rows[name] = len(self._rows)
            self._sizes[name] = size
            start += size
        rows = torch.zeros(len(self._rows), dtype=torch.uint8)
        rows[: self.committed.numel()] = self.committed
        self.committed = rows
        first = _extended(self._versions[0], start)
        second = _extended(self._versions[1], start) if self.rollback else first
        self._versions = (first, second)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def names(self) -> list[str]:
        """The parameters, in the order in which they were added."""
        return list(self._sizes)

    def offset(self, name: str) -> int:
        """First element of a parameter in either version."""
        return self._offsets[name]

    def row(self, name: str) -> int:
        """Row of a parameter in ``committed``."""
        return self._rows[name]

    @property
    def versions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both versions, flat; the same tensor without ``rollback``."""
        return self._versions

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the versions take."""
        return sum(v.nbytes for v in self._versions[: 1 + self.rollback])

    def __getitem__(self, name: str) -> torch.Tensor:
        """The committed version of a parameter: a flat view."""
        return self.at(name, self.version(name))

    def version(self, name: str) -> int:
        """Which version of a parameter is committed, 0 or 1."""
        return int(self.committed[self._rows[name]])

    def at(self, name: str, version: int) -> torch.Tensor:
        """A version of a parameter: a flat view."""
        start = self._offsets[name]
        return self._versions[version][start : start + self._sizes[name]]

    def commit(self, rows: Iterable[int]) -> None:
        """Make what the step wrote for these parameters the committed version."""
        self._last = list(rows)
        self._swap()

    def keep(self) -> None:
        """Make the last commit final: a step is about to write the other version."""
        self._last = None

    @property
    def can_undo(self) -> bool:
        """Whether the last commit can be taken back."""
        return self._last is not None and (self.rollback or not self._sizes)

    def undo(self) -> None:
        """Take the last commit back; only while ``can_undo``."""
        self._swap()
        self.keep()

    def _swap(self) -> None:
        if self.rollback and self._last:
            flags = self.committed.numpy()
            flags[np.asarray(self._last)] ^= 1

    def scale(self, factor: float) -> None:
        """Multiply everything."""
        for version in self._versions[: 1 + self.rollback]:
            version.mul_(factor)

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Commit these values; parameters without one become zero."""
        for name in self._sizes:
            held = values.get(name)
            view = self[name]
            view.zero_() if held is None else view.copy_(held.reshape(-1))
        self.keep()


def _extended(old: torch.Tensor, numel: int) -> torch.Tensor:
    new = torch.zeros(numel, dtype=old.dtype)
    new[: old.numel()] = old
    return new
