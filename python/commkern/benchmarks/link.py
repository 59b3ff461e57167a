"""A DDP step over a slow link: plain, dense and compressed; 25 million parameters.

Two ranks on one thread each, of a transformer, which computes, or of a model whose
backward waits, as for a GPU: its figures hold on busy cores, too. The reduction of a
bucket goes on beside backward, so what counts is the time that is left after backward:
it should hardly be more than that of the last bucket, which nothing can hide. Ratio
``bar``: that time over the last bucket's own plus 35 % of the own times of all others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commkern.auto import AutoChoice
from commkern.benchmarks.interleaved import CLOCK, record
from commkern.benchmarks.network import Link, message_ms, missing
from commkern.rank_pool import RankPool

WIDTH = 512
HEADS = 8
DEPTH = 8
BATCH, LENGTH = 16, 64
WORLD_SIZE = 2
PLAIN = "plain DDP"
WAYS = (PLAIN, "identity", "quantize:bits=8", "quantize:bits=4", "auto")
WAITING_LAYERS = 24
WAITING_WIDTH = 1024
WAITING_S = 1.0
LINKS = {"loopback": 0, "10000-mbit": 10_000, "1000-mbit": 1000, "100-mbit": 100}
ROUNDS = 5
_UNTIMED_ROUNDS = 1
_STEPS_OF_AUTO = 16
_STEPS_OF_ADVICE = 9
_SHARE = 0.35
_LARGEST_CODES = {"quantize:bits=8": 127, "quantize:bits=4": 7}
_MIB = 2**20
_MESSAGE = 12 * _MIB
_TIMEOUT_S = 900.0

Figures = dict[str, float]
Notes = dict[str, str]
#: Of one rank in one step: its times, and the own time of each bucket.
Step = tuple[Figures, list[float]]


class Replica:
    """A model, how its gradients are reduced, and what its steps take."""

    def __init__(self, way: str, model: str) -> None:
        import commkern as ck

        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(MODELS[model]())
        self.state = None if way == PLAIN else ck.register(self.ddp, way)
        self._last_gradient = 0.0

    def step(self, data: torch.Tensor) -> Step:
        """One step's times in ms. ``exposed``: from the last gradient to the end."""
        self.ddp.zero_grad(set_to_none=False)
        dist.barrier()
        begin = time.perf_counter()
        loss = self.ddp(data).square().mean()
        forward = time.perf_counter()
        with self._notes_last_gradient():
            loss.backward()
        end = time.perf_counter()
        seconds = {
            "step": end - begin,
            "backward": self._last_gradient - forward,
            "exposed": end - self._last_gradient,
        }
        return {name: 1e3 * value for name, value in seconds.items()}, self._own()

    @contextmanager
    def _notes_last_gradient(self) -> Iterator[None]:
        def note(_: torch.Tensor) -> None:
            self._last_gradient = time.perf_counter()

        parameters: list[Any] = list(self.ddp.parameters())
        hooks = [parameter.register_hook(note) for parameter in parameters]
        yield
        for hook in hooks:
            hook.remove()

    def _own(self) -> list[float]:
        if self.state is None:
            return []
        buckets = self.state.reducer.timeline.steps[-1].buckets
        return [(bucket.ended - bucket.started) / 1e6 for bucket in buckets]

    def gradients(self) -> torch.Tensor:
        """Of all parameters, in a row."""
        parameters: list[Any] = list(self.ddp.parameters())
        return torch.cat([parameter.grad.flatten() for parameter in parameters])


def _transformer() -> nn.Module:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )

    return nn.Sequential(*(layer() for _ in range(DEPTH)))


class _Wait(torch.autograd.Function):
    """Adds an element of a weight, whose gradient is given and takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, gradient: Any) -> Any:
        ctx.gradient = gradient
        return x + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(WAITING_S / WAITING_LAYERS)
        return gradients[0], ctx.gradient, None


class _Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WAITING_WIDTH, WAITING_WIDTH))
        self.gradient = torch.randn(WAITING_WIDTH, WAITING_WIDTH) * (
            1 + dist.get_rank()
        )

    def forward(self, x: torch.Tensor) -> Any:
        wait: Any = _Wait.apply
        return wait(x, self.weight, self.gradient)


def _waiting() -> nn.Module:
    return nn.Sequential(*(_Waiting() for _ in range(WAITING_LAYERS)))


MODELS = {"transformer": _transformer, "waiting": _waiting}


def in_rank(
    rank: int, _world_size: int, model: str
) -> tuple[dict[str, list[Step]], Notes]:
    """Check the first gradients, then time a step of each way in turn."""
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    replicas = {way: Replica(way, model) for way in WAYS}
    _check(replicas, data)
    for _ in range(_STEPS_OF_AUTO):
        replicas["auto"].step(data)
    times: dict[str, list[Step]] = {way: [] for way in WAYS}
    for _ in range(_UNTIMED_ROUNDS + ROUNDS):
        for way, replica in replicas.items():
            times[way].append(replica.step(data))
    return times, _notes(replicas, data)


def _check(replicas: dict[str, Replica], data: torch.Tensor) -> None:
    """Within half a code step on each side: of the ranks' gradients, of their mean."""
    plain = replicas[PLAIN]
    with plain.ddp.no_sync():
        plain.step(data)
    largest = plain.gradients().abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for replica in replicas.values():
        replica.step(data)
    for way, replica in replicas.items():
        error = (replica.gradients() - plain.gradients()).abs().max()
        bound = 1.001 * largest / _LARGEST_CODES[way] if way in _LARGEST_CODES else 0
        if not error <= bound:
            raise AssertionError(
                f"{way}: gradients differ by {error:.3g}, bound {bound:.3g}"
            )


def _notes(replicas: dict[str, Replica], data: torch.Tensor) -> Notes:
    """What the link does to a message of a bucket's size, and what was chosen."""
    chosen, dense = replicas["auto"].state, replicas["identity"].state
    for _ in range(_STEPS_OF_ADVICE):
        replicas["identity"].step(data)
    assert chosen is not None
    assert dense is not None
    assert isinstance(chosen.compressor, AutoChoice)
    return {
        "link": f"{_MESSAGE // _MIB} MiB take {message_ms(_MESSAGE):.1f} ms one way",
        "choice": chosen.compressor.sentence().removeprefix("auto: "),
        "advice": str(dense.advise()),
    }


def of_ranks(steps: Sequence[Step]) -> Figures:
    """A step's figures from those of all ranks.

    ``backward`` and the whole step are the slowest rank's, ``exposed`` is that of the
    rank whose backward ended last: others wait for it. In the same way a bucket's own
    time is the shortest.
    """
    times, own = zip(*steps, strict=True)
    buckets = [min(bucket) for bucket in zip(*own, strict=True)]
    figures = {name: max(one[name] for one in times) for name in ("step", "backward")}
    figures["exposed"] = min(one["exposed"] for one in times)
    if buckets:
        figures |= {"last": buckets[-1], "others": sum(buckets[:-1])}
    return figures


@dataclass(frozen=True)
class Measured:
    """Each round's figures of each way, and notes."""

    rounds: dict[str, list[Figures]]
    notes: Notes

    def figures(self, way: str) -> Figures:
        """Medians over the rounds, but for the step's."""
        rounds = self.rounds[way]
        names = [name for name in rounds[0] if name != "step"]
        return {f"{name} ms": median(one[name] for one in rounds) for name in names}

    def ratios(self, way: str) -> Figures:
        """The step's time over plain DDP's in the same round, and ``bar``."""
        pairs = zip(self.rounds[way], self.rounds[PLAIN], strict=True)
        ratios = {PLAIN: median(ours["step"] / plain["step"] for ours, plain in pairs)}
        if way == PLAIN:
            return {}
        bars = [
            one["exposed"] / (one["last"] + _SHARE * one["others"])
            for one in self.rounds[way]
        ]
        return ratios | {"bar": median(bars)}


@functools.cache
def measured(mbit: int, model: str) -> Measured:
    """Measured once a process."""
    with RankPool() as pool:
        run = functools.partial(Link(mbit).run, pool) if mbit else pool.run
        results = run(WORLD_SIZE, in_rank, model, timeout_s=_TIMEOUT_S)
    rounds = {
        way: [
            of_ranks(steps)
            for steps in zip(*(times[way] for times, _ in results), strict=True)
        ][_UNTIMED_ROUNDS:]
        for way in WAYS
    }
    return Measured(rounds, results[0][1])


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("model", MODELS)
def test_link(benchmark: Any, model: str, link: str, way: str) -> None:
    if LINKS[link] and missing():
        pytest.skip(missing())
    results = measured(LINKS[link], model)
    benchmark.group = f"DDP step over {link}, {model} model, {WORLD_SIZE} ranks"
    record(
        benchmark,
        [one["step"] / 1e3 for one in results.rounds[way]],
        ratios=results.ratios(way),
        figures=results.figures(way),
        notes=results.notes,
    )
