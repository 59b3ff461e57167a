"""What the hook keeps for each parameter from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from commkern.feedback import Feedback
from commkern.gather import mean_over_ranks
from commkern.groups import GroupWorker
from commkern.layout import Member
from commkern.ledger import Ledger
from commkern.residuals import ResidualStore


class Stores:
    """Residuals and, where asked for, the running sums of feedback that accumulates and
    the ledger: reserved, committed, scaled and saved together."""

    def __init__(
        self, feedback: Feedback | None, *, rollback: bool, ledger: bool
    ) -> None:
        self._feeds = feedback is not None
        accumulates = feedback is not None and feedback.accumulates
        self.residuals = ResidualStore({}, rollback=rollback)
        self.estimates = ResidualStore({}, rollback=True) if accumulates else None
        self.ledger = Ledger() if ledger else None
        self._held: set[int] = set()  # rows in which errors may wait to be sent
        self._flushed: set[int] = set()  # those of them that the open step has sent

    def named(self) -> dict[str, ResidualStore]:
        """All stores, by their key in a state_dict."""
        ledger = {} if self.ledger is None else self.ledger.stores()
        return self._versioned() | ledger

    def _versioned(self) -> dict[str, ResidualStore]:
        estimates = {} if self.estimates is None else {"estimates": self.estimates}
        return {"residuals": self.residuals} | estimates

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take."""
        return sum(store.nbytes for store in self.named().values())

    def reserve(self, sizes: Mapping[str, int], coded: Callable[[str], bool]) -> None:
        """Room for the parameters that have none yet; only ``coded`` ones are fed."""
        if self.ledger is not None:
            self.ledger.reserve(sizes)
        new = {n: size for n, size in sizes.items() if n not in self.residuals}
        fed = {n: size for n, size in new.items() if self._feeds and coded(n)}
        if fed:
            for store in self._versioned().values():
                store.extend(fed)

    def scale(self, factor: float) -> None:
        """Multiply everything."""
        if factor != 1.0:
            for store in self.named().values():
                store.scale(factor)

    # --- a step -------------------------------------------------------------------

    def open_step(self) -> None:
        """What the step before committed can no longer be taken back."""
        for store in self._versioned().values():
            store.keep()

    def forget_step(self) -> None:
        """Count nothing of the step that is open."""
        self._flushed.clear()
        if self.ledger is not None:
            self.ledger.forget_step()

    def note(self, members: Sequence[Member], rows: AbstractSet[int]) -> None:
        """A bucket of the open step has written these rows."""
        flushed = rows & {member.row for member in members if member.flush}
        self._flushed |= flushed
        self._held |= rows - flushed

    def close_step(self, rows: list[int], *, finite: bool) -> None:
        """Make what the step wrote for these rows the committed version, if all of its
        results are finite."""
        if finite:
            for store in self._versioned().values():
                store.commit(rows)
            self._held -= self._flushed
        if self.ledger is None:
            return
        if finite:
            self.ledger.commit()
        elif not self.residuals.rollback:  # the step's contribution is lost
            self.ledger.restart(self.residuals)

    def undo(self) -> None:
        """Take the last commit back."""
        for store in self._versioned().values():
            store.undo()

    # --- what was held back: told by what all ranks know, so the same on all ---------

    def holds(self, name: str) -> bool:
        """Whether a parameter has errors to send, on any rank. Feedback that
        accumulates never does: its residuals are what was sent."""
        known = self.estimates is None and name in self.residuals
        return known and self.residuals.row(name) in self._held

    @property
    def held_back(self) -> list[str]:
        """The parameters that have, by name."""
        names = self.residuals.names()
        return sorted(names[row] for row in self._held)

    @held_back.setter
    def held_back(self, names: Iterable[str]) -> None:
        self._held = {self.residuals.row(n) for n in names if n in self.residuals}

    def rejoin(self, worker: GroupWorker, step: int) -> None:
        """Go on with other ranks, which may know less of each other. Collective."""
        self.estimate_anew(worker, step)
        self.restart_ledger()
        self.held_back = self.residuals.names()

    def restart_ledger(self) -> None:
        """Start the ledger's sums anew from the residuals that there are."""
        if self.ledger is not None:
            self.ledger.restart(self.residuals)

    def estimate_anew(self, worker: GroupWorker, step: int) -> None:
        """Make the running sums the mean over the ranks that there are: what one that
        is gone had sent would stay in all results for ever. Collective."""
        if self.estimates is None:
            return
        names = self.residuals.names()
        means = mean_over_ranks(worker, step, [self.residuals[name] for name in names])
        self.estimates.replace({n: -m for n, m in zip(names, means, strict=True)})
