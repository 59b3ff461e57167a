"""The same question for a state in training, from what its last steps took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from commkern.advice import (
    MARGIN,
    Advice,
    bytes_sent,
    cheapest,
    human,
    kernels_ms,
    listed,
    read_candidates,
    use,
)
from commkern.compressors import Compressor, Identity
from commkern.gather import gather
from commkern.layout import Member, effective
from commkern.plan import Plan
from commkern.reducer import Reducer
from commkern.timeline import StepTimes

_LEAST_STEPS = 2


@dataclass(frozen=True)
class BucketCost:
    """Figures of a bucket in milliseconds, agreed between ranks.

    ``ready``: from the end of the step before until the last rank has filled it;
    ``kernel``: the slowest rank's; ``exchange``: the rank's that waited the least for
    others; ``overhead``: the rest of its reduction.
    """

    ready: float
    kernel: float
    exchange: float
    overhead: float

    @property
    def total(self) -> float:
        """The time of its reduction."""
        return self.kernel + self.exchange + self.overhead


@dataclass(frozen=True)
class Forecast:
    """Predicts the time of a step with another compressor, from one that was measured.

    Buckets are reduced one after the other, each from when it is full. Bytes on the
    wire are known, kernels' times are scaled by `COPIES`.
    """

    plans: Sequence[Plan]
    buckets: Sequence[BucketCost]
    latency_ms: float
    is_exempt: Callable[[str], bool]

    @property
    def ms_per_byte(self) -> float:
        """What the link takes for a byte, beyond the latency."""
        pairs = zip(self.buckets, self.plans, strict=True)
        known = [(bucket, plan) for bucket, plan in pairs if plan.bytes_sent]
        waits = sum(max(0.0, b.exchange - self.latency_ms) for b, _ in known)
        sent = sum(plan.bytes_sent for _, plan in known)
        return waits / sent if sent else 0.0

    def __str__(self) -> str:
        end = self._end([bucket.total for bucket in self.buckets])
        exposed = end - self.buckets[-1].ready
        rate = self.ms_per_byte
        link = f"{human(1e3 / rate)}/s, " if rate else ""
        return (
            f"{exposed:.1f} ms of it after backward "
            f"(link: {link}{self.latency_ms:.2f} ms a reduction)"
        )

    def step_ms(self, coder: Compressor) -> float:
        """The time of a step."""
        pairs = zip(self.plans, self.buckets, strict=True)
        return self._end([self._total(coder, plan, cost) for plan, cost in pairs])

    def _total(self, coder: Compressor, plan: Plan, cost: BucketCost) -> float:
        """The time of a bucket's reduction."""
        now = plan.members
        then = [self._with(member, coder, plan.dtype) for member in now]
        if [m.compressor for m in now] == [m.compressor for m in then]:
            return cost.total
        sent = sum(
            bytes_sent(m.compressor, m.numel, plan.dtype, plan.world_size) for m in then
        )
        wire = min(self.latency_ms, cost.exchange) + sent * self.ms_per_byte
        before, after = _kernels_ms(plan, now), _kernels_ms(plan, then)
        kernel = cost.kernel * after / before if before else cost.kernel
        return kernel + wire + cost.overhead

    def _with(self, member: Member, coder: Compressor, dtype: str) -> Member:
        used = Identity() if self.is_exempt(member.name) else coder
        return effective(replace(member, compressor=used), dtype)

    def _end(self, totals: Sequence[float]) -> float:
        """When the last bucket is reduced."""
        now = 0.0
        for bucket, total in zip(self.buckets, totals, strict=True):
            now = max(now, bucket.ready) + total
        return now


def _kernels_ms(plan: Plan, members: Sequence[Member]) -> float:
    return sum(kernels_ms(m.compressor, m.numel, plan.world_size) for m in members)


def state_advice(
    reducer: Reducer,
    is_exempt: Callable[[str], bool],
    candidates: Sequence[str | Compressor],
) -> Advice:
    """What `CompressionState.advise` returns."""
    names, coders = read_candidates(candidates)
    steps = _comparable(list(reducer.timeline.steps))
    _check_count(reducer, len(steps))
    plans = [bucket.plan for bucket in steps[-1].buckets]
    period_ms, latency_ms, buckets = _agreed(reducer, steps)
    forecast = Forecast(plans, buckets, latency_ms, is_exempt)
    predicted = [forecast.step_ms(coder) for coder in coders]
    best = cheapest(predicted, MARGIN)
    times = dict(zip(names, predicted, strict=True))
    reason = (
        f"{use(names[best])}: a step takes {period_ms:.1f} ms now, {forecast}; "
        f"predicted: {listed(times)}"
    )
    return Advice(names[best], times, reason)


def _agreed(
    reducer: Reducer, steps: Sequence[StepTimes]
) -> tuple[float, float, list[BucketCost]]:
    """Milliseconds of a step and of a reduction of a few bytes, and of each bucket."""
    figures = torch.stack([_figures(times) for times in steps]).median(0).values
    periods = sorted((times.span + (times.rest or 0)) / 1e6 for times in steps)
    mine = [periods[(len(periods) - 1) // 2], *figures.flatten().tolist()]
    worker, clock, step = reducer.worker, reducer.timeline.clock, reducer.step

    def agree() -> torch.Tensor:
        with worker.or_tell(step):
            gather(worker, [0.0], step)  # makes its plan
            begin = clock()
            gather(worker, [0.0], step)
            return gather(worker, [(clock() - begin) / 1e6, *mine], step)

    table = worker.call(agree)
    low, high = table.amin(0).tolist(), table.amax(0).tolist()
    buckets = [
        BucketCost(high[at], high[at + 1], low[at + 2], low[at + 3])
        for at in range(2, len(low), 4)
    ]
    return high[1], low[0], buckets


def _figures(times: StepTimes) -> torch.Tensor:
    """A row for each bucket: ready, kernel, exchange and overhead in ms."""
    rows = [
        (
            bucket.submitted - (times.before or 0),
            bucket.kernel,
            bucket.exchange,
            bucket.ended - bucket.started - bucket.kernel - bucket.exchange,
        )
        for bucket in times.buckets
    ]
    return torch.tensor(rows, dtype=torch.float64) / 1e6


def _comparable(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """The steps that did what the last one did, and nothing that is done once."""
    usable = [times for times in steps if times.before is not None and not times.extra]
    plans = [[bucket.plan for bucket in times.buckets] for times in usable]
    return [t for t, made in zip(usable, plans, strict=True) if made == plans[-1]]


def _check_count(reducer: Reducer, mine: int) -> None:
    """ValueError on every rank where one of them has too few steps: errors may be
    sampled on some ranks only."""
    worker, step = reducer.worker, reducer.step

    def agree() -> torch.Tensor:
        with worker.or_tell(step):
            return gather(worker, [float(mine)], step)

    least = int(worker.call(agree).min())
    if least < _LEAST_STEPS:
        raise ValueError(
            f"advise() needs {_LEAST_STEPS} finished steps that are alike, got "
            f"{least}; steps of a new layout and sampled ones are not counted"
        )
