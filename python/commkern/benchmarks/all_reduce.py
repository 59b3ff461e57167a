"""``commkern.all_reduce`` of 25 MiB over gloo against ``torch.distributed``'s own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commkern.benchmarks.interleaved import (
    CLOCK,
    Samples,
    record,
    sample,
    time_in_turn,
)

NBYTES = 25 * 2**20
COMPRESSORS = ("identity", "cast:dtype=bf16", "quantize:bits=8", "quantize:bits=4")
PEERS = ("dist fp32", "dist bf16", "copy")
_LARGEST_CODE = {"quantize:bits=8": 127, "quantize:bits=4": 7}
_BLOCK = 128


def in_rank(rank: int, world_size: int) -> dict[str, float]:
    """Check every way's answer, then time all of them in turn."""
    import commkern as ck

    for compressor in COMPRESSORS:
        _check(rank, world_size, compressor)
    data = torch.randn(NBYTES // 4)
    target = torch.empty_like(data)
    short = data.bfloat16()

    def of(compressor: str) -> Callable[[], Any]:
        return lambda: ck.all_reduce(data, dist.ReduceOp.AVG, compressor=compressor)

    ways: dict[str, Callable[[], Any]] = {name: of(name) for name in COMPRESSORS}
    ways["dist fp32"] = lambda: dist.all_reduce(target)
    ways["dist bf16"] = lambda: dist.all_reduce(short)
    ways["copy"] = lambda: target.copy_(data)
    return time_in_turn(ways)


def _check(rank: int, world_size: int, compressor: str) -> None:
    """Integers that every compressor carries exactly: the sum has to be exact."""
    import commkern as ck

    largest = _LARGEST_CODE.get(compressor, 7)
    index = torch.arange(NBYTES // 4)
    codes = (index * 5 % (2 * largest + 1) - largest).float()
    codes[::_BLOCK] = largest
    data = codes * (rank + 1)
    ck.all_reduce(data, compressor=compressor)
    total = world_size * (world_size + 1) // 2
    if not torch.equal(data, codes * total):
        raise AssertionError(f"{compressor}: the sum of exact inputs is not exact")


@functools.cache
def samples(world_size: int) -> Samples:
    """Measured once a process."""
    return sample(world_size, in_rank)


@pytest.mark.benchmark(group="all_reduce 25 MiB", timer=CLOCK)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", [*COMPRESSORS, *PEERS])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce(benchmark: Any, world_size: int, way: str) -> None:
    measured = samples(world_size)
    ratios = {peer: measured.ratio(way, peer) for peer in PEERS if peer != way}
    record(benchmark, measured.seconds[way], nbytes=NBYTES, ratios=ratios)
