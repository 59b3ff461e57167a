"""Residuals kept in bf16: widened to fp32, which kernels take, around each bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from commkern.feedback import Feedback
from commkern.plan import Plan
from commkern.residuals import ResidualStore

_LARGEST = torch.finfo(torch.bfloat16).max
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_narrow(feedback: Feedback | None, residual_dtype: str, ledger: bool) -> None:
    """ValueError for a dtype of residuals that there is none of, and for one that
    rounds where sums must stay exact."""
    if residual_dtype not in tuple(DTYPES):
        raise ValueError(
            f"residual_dtype must be 'fp32' or 'bf16', got {residual_dtype!r}"
        )
    if residual_dtype == "bf16" and ledger:
        raise ValueError(
            "ledger=True needs residual_dtype='fp32', got 'bf16': what that rounds "
            "away is lost"
        )
    if residual_dtype == "bf16" and feedback is not None and feedback.accumulates:
        raise ValueError(
            f"feedback {str(feedback)!r} needs residual_dtype='fp32', got 'bf16': its "
            "residuals are running sums"
        )


@dataclass(frozen=True)
class Residuals:
    """What a plan reads and writes: both versions (one tensor without roll-back), and
    which of them is committed, by row."""

    versions: tuple[torch.Tensor, torch.Tensor]
    committed: torch.Tensor


@contextmanager
def widened(store: ResidualStore, plan: Plan) -> Iterator[ResidualStore | Residuals]:
    """The residuals of a plan's run: the store, or fp32 copies of those of the bucket.

    What the run writes is rounded to the store's dtype behind it, to nearest with ties
    to even; what it did not write keeps its bits.
    """
    if store.dtype == torch.float32:
        yield store
        return
    first = torch.zeros(plan.buffers["residual0"] // 4)
    second = torch.zeros_like(first) if store.rollback else first
    versions = (first, second)
    places = [(m.name, m.residual, m.numel) for m in plan.members]
    held = [(n, slice(at, at + size)) for n, at, size in places if at is not None]
    for name, place in held:
        versions[store.version(name)][place] = store[name]
    yield Residuals(versions, store.committed)
    for name, place in held:
        written = store.version(name) ^ store.rollback
        values = versions[written][place].clamp_(-_LARGEST, _LARGEST)
        store.at(name, written).copy_(values)
