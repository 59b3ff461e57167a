"""``compressor="auto"``: try each candidate in real steps, and keep the fastest."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commkern.advice import cheapest, listed, read_list, short_name
from commkern.compressors import Compressor, Identity
from commkern.compressors import compressor as read_compressor
from commkern.feedback import ErrorFeedback
from commkern.gather import gather
from commkern.groups import GroupWorker
from commkern.inputs import check_feedback, checked_int, checked_number
from commkern.timeline import StepTimes
from commkern.watch import LOG

_ENOUGH = 2  # samples of a candidate that all ranks have
_PATIENCE = 3  # times the rounds that are wanted, before it ends without a comparison
_NONE = -1.0
CHOICE, SAMPLES = "auto", "auto_samples"  # keys of a state_dict


@dataclass(frozen=True)
class Auto:
    """Settings of the choice; ``compressor="auto"`` is ``Auto()``.

    Parameters
    ----------
    candidates : compressors, or their string forms, least lossy first
        What "identity" is compared with.
    margin : float
        A candidate replaces what comes before it only where it makes a step shorter by
        more than this share of it.
    rounds : int, at least 3
        How often each candidate is tried, in turn, a step each; the first two tries
        are not counted where plans are made in them.
    """

    candidates: tuple[str | Compressor, ...] = ("quantize:bits=8", "quantize:bits=4")
    margin: float = 0.05
    rounds: int = 5

    def __post_init__(self) -> None:
        coders = tuple(read_list(self.candidates))
        object.__setattr__(self, "candidates", coders)
        if not coders or len({Identity(), *coders}) != len(coders) + 1:
            raise ValueError(
                "candidates must be one or more compressors, each once and none of "
                f"them identity, got {[str(coder) for coder in coders]}"
            )
        for coder in coders:
            check_feedback(coder, ErrorFeedback())
        if not 0 <= checked_number("margin", self.margin) < 1:
            raise ValueError(f"margin must be 0 or more and below 1, got {self.margin}")
        checked_int("rounds", self.rounds, 3)

    @property
    def coders(self) -> tuple[Compressor, ...]:
        """Identity, then the candidates."""
        return (Identity(), *(read_compressor(c) for c in self.candidates))

    def __str__(self) -> str:
        names = ",".join(f"({coder})" for coder in self.coders[1:])
        return f"auto:candidates={names},margin={self.margin},rounds={self.rounds}"


class AutoChoice:
    """The choice of one state: what is tried in which step, and what came of it.

    Ranks try the same in the same step, and choose from figures of all ranks, gathered
    in a step whose number is known: so they choose alike.
    """

    def __init__(self, settings: Auto, first_step: int) -> None:
        self._settings = settings
        self._coders = settings.coders
        self._start = first_step
        self._restart(first_step)

    def _restart(self, step: int) -> None:
        self._first = max(step, self._start)
        self._choice: int | None = None
        self._chosen_at = 0
        self._samples: dict[int, tuple[float, float]] = {}
        self._milliseconds: dict[str, float] = {}

    @property
    def coders(self) -> tuple[Compressor, ...]:
        """What is tried: identity, then the candidates."""
        return self._coders

    def __str__(self) -> str:
        return str(self._settings)

    # --- what the policy asks -----------------------------------------------------

    def phase(self, step: int) -> int:
        """The number of the compressor in a step; 0 is identity."""
        if self._choice is not None:
            return self._choice
        return (step - self._first) % len(self._coders)

    def compressor(self, step: int) -> Compressor:
        """The compressor of a step."""
        return self._coders[self.phase(step)]

    @property
    def choice(self) -> Compressor | None:
        """What was chosen; None while candidates are tried."""
        return None if self._choice is None else self._coders[self._choice]

    @property
    def milliseconds(self) -> dict[str, float]:
        """The time of a step with each compressor, once the choice was made."""
        return dict(self._milliseconds)

    # --- measuring ----------------------------------------------------------------

    def after(self, times: StepTimes, worker: GroupWorker) -> None:
        """Take the times of a finished step; choose, if it was the last of a round and
        rounds enough are behind. On the worker, on every rank after the same step."""
        if self._choice is not None or times.step < self._first:
            return
        if self._counts(times):
            rest = _NONE if times.rest is None else times.rest / 1e6
            self._samples[times.step] = (times.span / 1e6, rest)
        done, left = divmod(times.step + 1 - self._first, len(self._coders))
        if left == 0 and done >= self._settings.rounds:
            steps = range(self._first, times.step + 1)
            mine = [self._samples.get(step, (_NONE, _NONE)) for step in steps]
            figures = [value for pair in mine for value in pair]
            table = gather(worker, figures, times.step)
            self._decide(table.view(worker.world_size, -1, 2), times.step, done)

    def _counts(self, times: StepTimes) -> bool:
        """Whether the step is one of its candidate's, and without work done once."""
        coder = self.compressor(times.step)
        used = (m.compressor for bucket in times.buckets for m in bucket.plan.members)
        return not times.extra and coder in used

    def _decide(self, table: torch.Tensor, step: int, rounds: int) -> None:
        """From (ranks, steps, 2): each step's span and rest in ms, negative for none.

        A step takes its span plus the rest. The rank that is last to fill its first
        bucket has the shortest span and the longest rest; what others have in addition
        is waiting for it.
        """
        spans, rests = table[:, :, 0].amin(0), table[:, :, 1]
        counted = spans > 0
        tried = [
            spans[number :: len(self._coders)][counted[number :: len(self._coders)]]
            for number in range(len(self._coders))
        ]
        if min(map(len, tried)) >= _ENOUGH:
            known = rests.amin(0) >= 0
            rest = _median(rests[:, known].amax(0))
            self._choose([rest + _median(spans) for spans in tried], step)
        elif rounds >= _PATIENCE * self._settings.rounds:
            self._choose([], step)

    def _choose(self, costs: Sequence[float], step: int) -> None:
        best = cheapest(costs, self._settings.margin) if costs else 0
        self._choice, self._chosen_at = best, step + 1
        self._samples.clear()
        names = map(short_name, self._coders)
        self._milliseconds = dict(zip(names, costs, strict=False))
        LOG.info("%s", self.sentence())

    def sentence(self) -> str:
        """What was chosen and why, in one line."""
        if self._choice is None:
            return f"auto: trying {', '.join(map(short_name, self._coders))} in turn"
        measured = listed(self._milliseconds)
        why = f"a step takes {measured}" if measured else "no steps to compare"
        name = short_name(self._coders[self._choice])
        return f"auto: {name} from step {self._chosen_at} on: {why}"

    # --- going on -----------------------------------------------------------------

    def rejoin(self, step: int) -> None:
        """Start anew where ranks may differ: some may have chosen, others not yet."""
        if self._choice is None or self._chosen_at >= step:
            self._restart(step)

    def saved(self) -> dict[str, Any]:
        """Plain values: the choice, and this rank's own figures so far."""
        choice = {
            "choice": None if self._choice is None else str(self.choice),
            "chosen_at": self._chosen_at,
            "first_step": self._first,
            "milliseconds": list(map(list, self._milliseconds.items())),
        }
        samples = [[step, *pair] for step, pair in self._samples.items()]
        return {CHOICE: list(map(list, choice.items())), SAMPLES: samples}

    def load(self, saved: Mapping[str, Any], step: int) -> None:
        """Go on from what `saved` gave; anew where it is from no choice, or from one of
        what is no candidate here.

        Raises ValueError for what is damaged, and changes nothing then.
        """
        fresh = AutoChoice(self._settings, self._start)
        try:
            fresh._read(saved, step)
        except (KeyError, TypeError, ValueError) as error:
            shown = {key: saved.get(key) for key in (CHOICE, SAMPLES)}
            raise ValueError(
                f"the choice of the saved state is damaged: {error!r} in {shown}"
            ) from error
        vars(self).update(vars(fresh))

    def _read(self, saved: Mapping[str, Any], step: int) -> None:
        self._restart(step)
        choice = dict(saved.get(CHOICE) or {})
        names = [None, *map(str, self._coders)]
        if choice.get("choice", "") not in names:
            return
        if choice["choice"] is not None:
            self._choice = names.index(choice["choice"]) - 1
        self._first, self._chosen_at = (
            operator.index(choice[key]) for key in ("first_step", "chosen_at")
        )
        self._milliseconds = {n: float(ms) for n, ms in choice["milliseconds"]}
        self._samples = {
            operator.index(at): (float(a), float(b))
            for at, a, b in saved.get(SAMPLES) or []
        }


def saved(compressor: object) -> dict[str, Any]:
    """What a state_dict holds of the choice; nothing where there is none to make."""
    return compressor.saved() if isinstance(compressor, AutoChoice) else {}


def of_all_ranks(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What of `saved` holds for every rank: a choice that was made."""
    if CHOICE not in entries:
        return {}
    made = dict(entries[CHOICE] or {}).get("choice") is not None
    return {CHOICE: entries[CHOICE] if made else None, SAMPLES: None}


def read(spec: Any, first_step: int, **others: Any) -> Any:
    """The choice that "auto" and `Auto` stand for; anything else as it is.

    Raises ValueError where it does not go with the other settings: without feedback a
    step without compression would lose nothing and later ones something, with a
    schedule or a delay a step's time tells nothing of its compressor, and some dense
    steps fall on each of a candidate's tries.
    """
    if isinstance(spec, str) and spec == "auto":
        spec = Auto()
    if not isinstance(spec, Auto):
        return spec
    if others["feedback"] is None:
        raise ValueError(
            f"compressor {str(spec)!r} needs error feedback, got feedback=None"
        )
    for setting in ("schedule", "delayed"):
        if others[setting]:
            raise ValueError(
                f"compressor {str(spec)!r} cannot be measured with {setting}=, got "
                f"{others[setting]!r}"
            )
    every, count = others.get("dense_every"), len(spec.coders)
    if isinstance(every, int) and 0 < every <= count and count % every == 0:
        raise ValueError(
            f"compressor {str(spec)!r} tries {count} compressors in turn, and with "
            f"dense_every={every} some of them in dense steps only; take one that does "
            f"not divide {count}"
        )
    return AutoChoice(spec, first_step)


def _median(values: torch.Tensor | Iterable[float]) -> float:
    """0 for none."""
    values = torch.as_tensor(values)
    return float(values.median()) if len(values) else 0.0
