"""A sparse gradient as rows of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from commkern.inputs import real_view


@dataclass(frozen=True)
class Table:
    """What a sparse tensor is a part of: ``count`` rows of ``width`` reals each."""

    shape: tuple[int, ...]
    sparse_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Table:
        """The table of a sparse COO tensor."""
        return cls(tuple(gradient.shape), gradient.sparse_dim(), gradient.dtype)

    @property
    def count(self) -> int:
        """The number of rows: places in the sparse dimensions."""
        return math.prod(self.shape[: self.sparse_dim])

    @property
    def width(self) -> int:
        """Reals in a row: elements of the dense dimensions."""
        reals = 2 if self.dtype.is_complex else 1
        return math.prod(self.shape[self.sparse_dim :]) * reals

    def read(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the rows, ascending, and (rows, width) reals. May be views.

        Entries of a row are added in their order, as the backward pass of a dense
        embedding does; ``coalesce`` of torch adds them in any order.
        """
        indices, values = gradient._indices(), gradient._values()
        numbers = torch.zeros(indices.shape[1], dtype=torch.int64)
        for index, size in zip(indices, self.shape, strict=False):
            numbers.mul_(size).add_(index)
        entries = real_view(values).reshape(len(numbers), self.width)
        if gradient.is_coalesced():
            return numbers, entries
        found = np.unique(numbers.numpy(), return_inverse=True)
        rows, places = map(torch.from_numpy, found)
        add = torch.ops.aten.embedding_dense_backward
        return rows, add(
            entries, places, len(rows), padding_idx=-1, scale_grad_by_freq=False
        )

    def tensor(self, numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The coalesced sparse tensor of these rows."""
        indices, rest = [], numbers
        for size in reversed(self.shape[: self.sparse_dim]):
            indices.append(rest % max(size, 1))
            rest = rest // max(size, 1)
        dense_shape = self.shape[self.sparse_dim :]
        if self.dtype.is_complex:
            pairs = values.reshape(len(numbers), *dense_shape, 2)
            values = torch.view_as_complex(pairs.contiguous())
        return torch.sparse_coo_tensor(
            torch.stack(indices[::-1]),
            values.reshape(len(numbers), *dense_shape),
            self.shape,
            is_coalesced=True,
            check_invariants=False,
        )


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """All elements of a sparse gradient, in reals."""
    table = Table.of(gradient)
    numbers, values = table.read(gradient)
    whole = values.new_zeros(table.count, table.width)
    whole[numbers] = values
    return whole.view(-1)
