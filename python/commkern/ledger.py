"""The ledger of error feedback: what a rank gave, what it got back, what is owed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from commkern.errors import LedgerError
from commkern.feedback import Feedback
from commkern.gather import mean_over_ranks
from commkern.groups import GroupWorker
from commkern.layout import Member
from commkern.residuals import ResidualStore

TOLERANCE = 1e-5
_HALF = (torch.float16, torch.bfloat16)


def check_countable(feedback: Feedback | None) -> None:
    """ValueError for feedback under which nothing has to balance."""
    if str(feedback) != "error":
        raise ValueError(
            "ledger=True checks that plain error feedback loses nothing: feedback must "
            f'be "error", got {str(feedback)!r}'
        )


class Ledger:
    """Sums in fp64, for each parameter, over the committed steps.

    For any number of steps: sum of results + mean over ranks of the residuals = mean
    over ranks of the sum of gradients. Residuals that are there when the sums start
    count as given. For 16-bit gradients the sum of the bounds of the results' own
    rounding is kept as well.
    """

    def __init__(self) -> None:
        self._given = _sums()
        self._returned = _sums()
        self._rounding = _sums()
        self._step: list[tuple[Sequence[Member], torch.Tensor, torch.Tensor]] = []

    def stores(self) -> dict[str, ResidualStore]:
        """What is saved, by its key in a state_dict."""
        return {
            "ledger_given": self._given,
            "ledger_returned": self._returned,
            "ledger_rounding": self._rounding,
        }

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Sums for the parameters that have none yet."""
        new = {n: size for n, size in sizes.items() if n not in self._given}
        if new:
            self._given.extend(new)
            self._returned.extend(new)
            self._rounding.extend(dict.fromkeys(new, 1))

    def restart(self, residuals: ResidualStore) -> None:
        """Start the sums anew from the residuals that there are."""
        self.forget_step()
        self._given.replace({name: residuals[name] for name in residuals.names()})
        self._returned.replace({})
        self._rounding.replace({})

    # --- a step -------------------------------------------------------------------

    def note(
        self, members: Sequence[Member], given: torch.Tensor, returned: torch.Tensor
    ) -> None:
        """A bucket before and after; copies both, flat, until the step is closed."""
        self._step.append((members, given, returned.clone()))

    def forget_step(self) -> None:
        """Count nothing of the step that is open."""
        self._step.clear()

    def commit(self) -> None:
        """Count the step that is open."""
        for members, given, returned in self._step:
            for member in members:
                span = slice(member.offset, member.offset + member.numel)
                self._given[member.name].add_(given[span])
                self._returned[member.name].add_(returned[span])
                self._rounding[member.name].add_(_rounding(returned[span]))
        self.forget_step()

    # --- the check ----------------------------------------------------------------

    def check(
        self, worker: GroupWorker, step: int, owed: Iterable[ResidualStore]
    ) -> dict[str, float]:
        """The relative difference of each parameter; ``owed`` is what is still to come.

        Collective. Raises LedgerError, on every rank, above what is allowed.
        """
        names = self._given.names()
        left = [torch.zeros_like(self._given[name]) for name in names]
        for name, total in zip(names, left, strict=True):
            for store in owed:
                if name in store:
                    total.add_(store[name])
        given = [self._given[name] for name in names]
        returned = [self._returned[name] for name in names]
        means = mean_over_ranks(worker, step, [*given, *returned, *left])
        count = len(names)
        found = {}
        for index, name in enumerate(names):
            wanted, got, rest = means[index::count]
            found[name] = self._difference(name, wanted, got, rest)
        return found

    def _difference(
        self, name: str, wanted: torch.Tensor, got: torch.Tensor, rest: torch.Tensor
    ) -> float:
        apart = got + rest - wanted
        norms = [float(torch.linalg.vector_norm(x)) for x in (wanted, got, rest)]
        size, difference = max(norms), float(torch.linalg.vector_norm(apart))
        allowed = TOLERANCE * size + float(self._rounding[name])
        # Turned round, so that NaN is above it.
        if not difference <= allowed:
            worst = int(apart.abs().nan_to_num(torch.inf).argmax())
            raise LedgerError(
                f"the ledger of {name!r} does not balance: results and mean residual "
                f"come to {float(got[worst] + rest[worst])!r} in element {worst}, mean "
                f"gradients to {float(wanted[worst])!r}; over the parameter the "
                f"difference is {difference / size if size else difference:.3g} of its "
                f"size, allowed {allowed / size if size else allowed:.3g}"
            )
        return difference / size if size else difference


def _sums() -> ResidualStore:
    return ResidualStore({}, rollback=False, dtype=torch.float64)


def _rounding(result: torch.Tensor) -> float:
    """Bound on the L2 norm of a 16-bit result's rounding; 0 for fp32 and fp64.

    Two roundings, of the sum and of the mean, each to half a unit in the last place.
    """
    if result.dtype not in _HALF:
        return 0.0
    kind = torch.finfo(result.dtype)
    norm = float(torch.linalg.vector_norm(result, dtype=torch.float64))
    return float(kind.eps * (norm + kind.tiny * result.numel() ** 0.5))
