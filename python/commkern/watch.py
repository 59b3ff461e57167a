"""What users should hear about once: log lines of the hook."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from commkern.compressors import Identity
from commkern.groups import Outcome
from commkern.layout import Member
from commkern.plan import Plan

if TYPE_CHECKING:
    from commkern.state import CompressionState

LOG = logging.getLogger("commkern")
LOG.addHandler(logging.NullHandler())


def registered(
    state: CompressionState, parameters: Mapping[str, torch.Tensor], exempt: set[str]
) -> None:
    """Tell what a new state will do; warn where that is nothing."""
    worker = state.reducer.worker
    chosen = [p.numel() for name, p in parameters.items() if name not in exempt]
    LOG.info(
        "rank %d of %d: %s with feedback %s; %d parameters (%d elements) compressed, "
        "%d exempt; residuals take %d bytes",
        worker.rank,
        worker.world_size,
        state.compressor,
        state.feedback,
        len(chosen),
        sum(chosen),
        len(exempt),
        state.residuals.nbytes,
    )
    if exempt and not chosen and not isinstance(state.compressor, Identity):
        LOG.warning(
            "all %d parameters are exempt: %s compresses nothing; exempt=None would",
            len(exempt),
            state.compressor,
        )


class Watch:
    """Looks at the first run of every plan for signs that compressing goes wrong, and
    for results of zeros at each so many steps, too.

    A plan is new after a change of bucket layout or of compressors; other steps cost
    nothing. Each warning comes once.
    """

    every = 128  # steps: so the pass over the results counts little

    def __init__(self) -> None:
        self._new: set[Plan] = set()
        self._wanted = 0  # parameters of new plans that are to be compressed
        self._told: set[str] = set()

    def plan_built(self, plan: Plan, members: Iterable[Member], step: int) -> None:
        """A bucket has a plan that this state has not run before."""
        self._new.add(plan)
        self._wanted += sum(not isinstance(m.compressor, Identity) for m in members)
        LOG.debug(
            "rank %d, step %d: plan for a bucket of %d parameters, %s, that sends "
            "%d bytes for %d",
            plan.rank,
            step,
            len(plan.members),
            plan.dtype,
            plan.bytes_sent,
            plan.bytes_dense,
        )

    def bucket_done(
        self,
        plan: Plan,
        outcome: Outcome,
        data: torch.Tensor,
        step: int,
        *,
        look: bool,
    ) -> None:
        """A bucket is reduced; ``look`` where its plan is not new, too."""
        due = look or plan in self._new or step % self.every == 0
        if not due or "zeros" in self._told:
            return
        for member, touched in zip(plan.members, outcome.touched, strict=True):
            if not touched or isinstance(member.compressor, Identity):
                continue
            if not data[member.offset : member.offset + member.numel].any():
                self._warn(
                    "zeros",
                    f"the reduced gradient of {member.name!r} is all zero, though the "
                    f"gradient is not: {member.compressor} dropped everything",
                )

    def step_done(self, step: int, bytes_sent: int, bytes_dense: int) -> None:
        """The last bucket of a step is reduced."""
        if not self._new:
            return
        if self._wanted and bytes_sent >= bytes_dense > 0:
            self._warn(
                "size",
                f"step {step} sent {bytes_sent} bytes where plain elements would take "
                f"{bytes_dense}: compression saves nothing",
            )
        self._new.clear()
        self._wanted = 0

    def _warn(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            LOG.warning("%s", text)
