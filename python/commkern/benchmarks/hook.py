"""DDP steps of a model of 26 million parameters in two processes: with and without."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commkern.benchmarks.interleaved import (
    CLOCK,
    Samples,
    record,
    sample,
    time_in_turn,
)

WIDTH = 2560
DEPTH = 4  # each layer is a bucket
BATCH = 32
STEPS = 4  # in a row, as in training
WORLD_SIZE = 2
PLAIN = "plain DDP"
AGAIN = "plain DDP again"  # how far apart are two that do the same?
LARGEST_CODE = {"identity": math.inf, "quantize:bits=8": 127, "quantize:bits=4": 7}


def in_rank(rank: int, _world_size: int, compressor: str) -> dict[str, float]:
    """Check the first gradients, then time steps with and without in turn.

    One compressor at a time: the memory of others in the same processes makes steps
    longer.
    """
    import commkern as ck

    plain = _replica()
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(BATCH, WIDTH, generator=generator)
    ways = {way: functools.partial(_step, _replica(), data) for way in (PLAIN, AGAIN)}
    ours = _replica()
    ck.register(ours, compressor)
    _check(plain, ours, data, compressor)
    del plain
    ways[compressor] = functools.partial(_step, ours, data)
    return time_in_turn(ways, STEPS)


def _replica() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
    return DistributedDataParallel(torch.nn.Sequential(*layers))


def _step(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    ddp.zero_grad(set_to_none=False)
    ddp(data).square().mean().backward()


def _check(
    plain: DistributedDataParallel,
    ours: DistributedDataParallel,
    data: torch.Tensor,
    compressor: str,
) -> None:
    """Equal bits without compression, else within half a code step on each side: of
    the ranks' gradients, of their mean."""
    with plain.no_sync():
        plain.zero_grad()
        plain(data).square().mean().backward()
    largest = torch.stack([p.grad.abs().max() for p in _parameters(plain)])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    _step(plain, data)
    _step(ours, data)
    for p, q, top in zip(_parameters(plain), _parameters(ours), largest, strict=True):
        error = (p.grad - q.grad).abs().max()
        bound = 1.001 * top / LARGEST_CODE[compressor]
        if not error <= bound:
            raise AssertionError(
                f"{compressor}: gradients differ by {error:.3g}, bound {bound:.3g}"
            )


def _parameters(ddp: DistributedDataParallel) -> list[Any]:
    return list(ddp.parameters())


@functools.cache
def samples(compressor: str) -> Samples:
    """Measured once a process."""
    return sample(WORLD_SIZE, in_rank, compressor)


@pytest.mark.benchmark(
    group=f"DDP step of {DEPTH} x Linear({WIDTH}, {WIDTH})", timer=CLOCK
)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", [*LARGEST_CODE, AGAIN, PLAIN])
def test_step(benchmark: Any, way: str) -> None:
    measured = samples(way if way in LARGEST_CODE else "identity")
    ratios = {PLAIN: measured.ratio(way, PLAIN)} if way != PLAIN else {}
    nbytes = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)
    record(benchmark, measured.seconds[way], nbytes=nbytes, ratios=ratios)
