"""A DDP step of one large layer in two processes: plain against 8 bits."""

from __future__ import annotations

import functools
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
BATCH = 32
WORLD_SIZE = 2
COMPRESSOR = "quantize:bits=8"
PLAIN = "plain DDP"
_LARGEST_CODE = 127


def in_rank(rank: int, _world_size: int) -> dict[str, float]:
    """Check the first gradients, then time steps of both in turn."""
    import commkern as ck

    plain, ours = _replica(), _replica()
    ck.register(ours, COMPRESSOR, feedback="error")
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(BATCH, WIDTH, generator=generator)
    _check(plain, ours, data)
    return time_in_turn(
        {PLAIN: lambda: _step(plain, data), COMPRESSOR: lambda: _step(ours, data)}
    )


def _replica() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))


def _step(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    ddp.zero_grad(set_to_none=False)
    ddp(data).square().mean().backward()


def _check(
    plain: DistributedDataParallel, ours: DistributedDataParallel, data: torch.Tensor
) -> None:
    """Within half a code step on each side: of the ranks' gradients, of their mean."""
    with plain.no_sync():
        _step(plain, data)
    largest = plain.module.weight.grad.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    _step(plain, data)
    _step(ours, data)
    error = (ours.module.weight.grad - plain.module.weight.grad).abs().max()
    bound = 1.001 * largest / _LARGEST_CODE
    if not error <= bound:
        raise AssertionError(f"gradients differ by {error:.3g}, bound {bound:.3g}")


@functools.cache
def samples() -> Samples:
    """Measured once a process."""
    return sample(WORLD_SIZE, in_rank)


@pytest.mark.benchmark(group=f"DDP step of Linear({WIDTH}, {WIDTH})", timer=CLOCK)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", [COMPRESSOR, PLAIN])
def test_step(benchmark: Any, way: str) -> None:
    measured = samples()
    ratios = {PLAIN: measured.ratio(way, PLAIN)} if way != PLAIN else {}
    nbytes = 4 * (WIDTH * WIDTH + WIDTH)
    record(benchmark, measured.seconds[way], nbytes=nbytes, ratios=ratios)
