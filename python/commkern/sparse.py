"""Sparse gradients, of embeddings: only the rows that some rank has are reduced.

A gradient is coalesced and seen as rows of a table. Ranks tell each other how many rows
they have, then which, and reduce the union of those as one dense block. What they know
by then is the same on all of them, so that they take the same route: a block of those
rows, or of the whole table where that is no larger.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from commkern.compose import Settings
from commkern.compressors import Identity
from commkern.dtypes import dtype_name
from commkern.groups import GroupWorker, Outcome
from commkern.layout import Member
from commkern.plan import Plan
from commkern.row_tables import Table
from commkern.watch import LOG

_EXACT = {torch.float32: 2**24, torch.float64: 2**53}  # whole numbers up to these
_SUM = Settings(op="sum")


def sparse_names(
    module: nn.Module, parameters: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """The parameters of which DDP expects a sparse gradient."""
    parts = (
        p for p in module.modules() if isinstance(p, nn.Embedding | nn.EmbeddingBag)
    )
    weights = {id(part.weight) for part in parts if part.sparse}
    return frozenset(name for name, p in parameters.items() if id(p) in weights)


def check_delayed(parameters: Mapping[str, torch.Tensor], delayed: bool) -> None:
    """ValueError for results that cannot wait; ``parameters`` are the sparse ones."""
    trained = [name for name, p in parameters.items() if p.requires_grad]
    if delayed and trained:
        raise ValueError(
            f"delayed must be False with sparse gradients, got {delayed}: the rows of "
            f"{trained[0]!r} change from step to step, and its result cannot take the "
            "place of the next step's; make the layer with sparse=False"
        )


class Reduced(NamedTuple):
    """A bucket that is through. ``plan`` stands for it in figures: it has the whole
    table as its member, and no exchanges, which depend on the data; ``new`` tells
    whether plans were made."""

    result: torch.Tensor
    plan: Plan
    outcome: Outcome
    new: bool


class SparseBuckets:
    """Reduces the buckets of sparse gradients, each of one parameter of ``names``."""

    def __init__(self, names: Collection[str], settings: Settings) -> None:
        self._names = names
        self._settings = settings
        self._told: set[tuple[str, str]] = set()
        self._seen: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._figures: dict[Any, Plan] = {}
        self._last: dict[str, dict[str, Any]] = {}

    def last(self) -> dict[str, dict[str, Any]] | None:
        """Route, rows of the union and of the table in the last reduction, by name."""
        return {name: dict(found) for name, found in self._last.items()} or None

    def check(self, names: Iterable[str], gradient: torch.Tensor) -> None:
        """TypeError for a parameter that was not known to have sparse gradients."""
        (name,) = names
        if name not in self._names:
            raise TypeError(
                f"the gradient of {name!r} has layout {gradient.layout}, and this "
                f"state expects {torch.strided}: its layer had no sparse=True when the "
                "state was made, or the state was made with delayed=True"
            )

    def reduce(
        self,
        worker: GroupWorker,
        names: Iterable[str],
        gradient: torch.Tensor,
        step: int,
    ) -> Reduced:
        """The average of a gradient over all ranks: a coalesced tensor of the rows that
        any rank has, also where they are zero. Inside a job of the worker."""
        (name,) = names
        table = Table.of(gradient)
        numbers, values = table.read(gradient)
        runs = _Runs(worker, name, step, self._seen)
        union = _union(runs, numbers, table.count)
        rows = min(table.count, rounded_up(len(union)))
        whole = rows == table.count
        if len(union):
            block = values.new_zeros(rows, table.width)
            block[numbers if whole else torch.searchsorted(union, numbers)] = values
            runs.reduce("", block.view(-1), self._settings)
            values = block[union] if whole else block[: len(union)]
        plan = self._plan(worker, name, table)
        route = "dense" if whole else "sparse"
        self._last[name] = {"route": route, "rows": len(union), "of": table.count}
        outcome = runs.total()
        self._tell(name, step, plan, outcome)
        return Reduced(table.tensor(union, values), plan, outcome, runs.new)

    def _plan(self, worker: GroupWorker, name: str, table: Table) -> Plan:
        """What stands for the bucket: the same in every step."""
        key = name, table, worker.rank, worker.world_size
        if key not in self._figures:
            member = Member(name, table.count * table.width, 0, Identity())
            dtype = dtype_name(table.dtype.to_real())
            plan = worker.plan([member], dtype, self._settings)
            self._figures[key] = replace(plan, buffers={}, exchanges=(), steps=())
        return self._figures[key]

    def _tell(self, name: str, step: int, plan: Plan, outcome: Outcome) -> None:
        """Log each route that a parameter takes, once."""
        found = self._last[name]
        if (name, found["route"]) in self._told:
            return
        self._told.add((name, found["route"]))
        LOG.info(
            "rank %d, step %d: the sparse gradient of %r has %d of %d rows and goes "
            "the %s route: %d bytes sent, %d for the whole table",
            plan.rank,
            step,
            name,
            found["rows"],
            found["of"],
            found["route"],
            outcome.bytes_sent,
            plan.bytes_dense,
        )


# --- what ranks tell each other -------------------------------------------------------


@dataclass
class _Runs:
    """The reductions of one bucket, uncompressed, and what they took."""

    worker: GroupWorker
    name: str
    step: int
    seen: weakref.WeakSet[Plan]
    new: bool = False
    outcomes: list[Outcome] = field(default_factory=list)

    def reduce(self, prefix: str, data: torch.Tensor, settings: Settings) -> None:
        """Reduce flat ``data`` in place."""
        member = Member(prefix + self.name, data.numel(), 0, Identity())
        plan = self.worker.plan([member], dtype_name(data.dtype), settings)
        if plan not in self.seen:
            self.seen.add(plan)
            self.new = True
        run = self.worker.run(plan, data, seed=settings.seed, step=self.step)
        self.outcomes.append(run)

    def from_all(self, prefix: str, mine: torch.Tensor) -> torch.Tensor:
        """``mine`` of each rank: whole numbers of equal count, a row a rank."""
        table = mine.new_zeros(self.worker.world_size, len(mine))
        table[self.worker.rank] = mine
        self.reduce(prefix, table.view(-1), _SUM)
        return table

    def total(self) -> Outcome:
        """All of them as one, the last of which had the values."""
        times = [run.times for run in self.outcomes]
        last = self.outcomes[-1]
        return Outcome(
            touched=last.touched if len(times) > 1 else np.zeros(1, dtype=bool),
            finite=last.finite,
            bytes_sent=sum(run.bytes_sent for run in self.outcomes),
            times={key: sum(spent[key] for spent in times) for key in times[0]},
        )


def rounded_up(count: int) -> int:
    """The least number not below ``count`` of which there are eight in an octave: so
    few different sizes, that their plans can be kept. At most an eighth larger.

    >>> [rounded_up(count) for count in (0, 5, 15, 17, 600)]
    [0, 5, 15, 18, 640]
    """
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def _union(runs: _Runs, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """The rows of a table of ``count`` that any rank has, ascending.

    Each rank lists its own, or marks them in a map of the table: the smaller one, by
    the longest list.
    """
    mine = torch.tensor([len(numbers)], dtype=torch.float64)
    longest = rounded_up(int(runs.from_all("count of ", mine).max()))
    if longest == 0:
        return numbers
    ranks = runs.worker.world_size
    dtype = next(d for d, exact in _EXACT.items() if count < exact)
    per_word = _rows_per_word(ranks)
    words = -(-count // per_word)
    if longest * ranks * dtype.itemsize <= words * 8:
        listed = torch.zeros(longest, dtype=dtype)
        listed[: len(numbers)] = numbers + 1
        every = runs.from_all("list of ", listed)
        return torch.from_numpy(np.unique(every[every > 0].long().numpy())) - 1
    return _map(runs, numbers, words, per_word)


def _rows_per_word(ranks: int) -> int:
    """How many digits that can count all ranks an fp64 holds exactly."""
    digits = 1
    while (ranks + 1) ** (digits + 1) <= _EXACT[torch.float64]:
        digits += 1
    return digits


def _map(runs: _Runs, numbers: torch.Tensor, words: int, per_word: int) -> torch.Tensor:
    """The union of the rows, marked: a digit a row, which counts the ranks that have
    it."""
    base = runs.worker.world_size + 1
    weights = torch.tensor([base**digit for digit in range(per_word)]).double()
    marks = torch.zeros(words, dtype=torch.float64)
    marks.index_add_(0, numbers // per_word, weights[numbers % per_word])
    runs.reduce("map of ", marks, _SUM)
    left, found = marks.long(), torch.zeros(words, per_word, dtype=torch.bool)
    for digit in range(per_word):
        found[:, digit] = left % base > 0
        left //= base
    return found.view(-1).nonzero().view(-1)
