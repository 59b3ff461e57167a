"""Many buckets on their way at once, and one that fails in the middle."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

WIDTH, LAYERS = 64, 32


def deep() -> DistributedDataParallel:
    """A bucket for each layer, once DDP has rebuilt them."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)


def step_of(ddp, rank):
    ddp.zero_grad()
    ddp(torch.full((2, WIDTH), 1.0 + rank)).square().mean().backward()


def many(rank, world_size, spec):
    ddp = deep()
    state = ck.register(ddp, spec)
    for _ in range(20):
        step_of(ddp, rank)
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.01 * p.grad
    return digest(ddp), state.step


@pytest.mark.parametrize("spec", ["quantize:bits=8", "fixed_point:bits=8"])
def test_many_buckets(ranks, spec):
    first, second = ranks.run(2, many, spec)
    assert first == second
    assert first[1] == 20


class Fails:
    """A bound transport whose post fails in one round."""

    def __init__(self, bound, number):
        self._bound, self._number = bound, number

    def __getattr__(self, name):
        return getattr(self._bound, name)

    def post(self, number):
        if number == self._number:
            raise RuntimeError("injected")
        self._bound.post(number)


def failing(rank, world_size, number):
    ddp = deep()
    state = ck.register(ddp, "fixed_point:bits=8")
    step_of(ddp, rank), step_of(ddp, rank)
    if rank == 1:
        transport = state.reducer.worker.transport
        bind, runs = transport.bind, []

        def bind_and_fail(*args):
            runs.append(args)
            bound = bind(*args)
            return Fails(bound, number) if len(runs) == 5 else bound

        transport.bind = bind_and_fail
    with pytest.raises(Exception) as caught:  # noqa: PT011 - another on each rank
        step_of(ddp, rank)
    error = caught.value
    return type(error).__name__, str(error), getattr(error, "__notes__", None)


@pytest.mark.parametrize("number", [0, 2, 3], ids="round {}".format)
def test_a_failure_in_any_stage_ends_both_ranks(ranks, number):
    (kind, text, _), (own, own_text, notes) = ranks.run(2, failing, number)
    assert kind == "PeerFailed"
    assert "rank 1" in text
    assert (own, own_text) == ("RuntimeError", "injected")
    if notes is not None:  # Python 3.11
        (note,) = notes
        assert "rank 1, step 2, bucket 4: " in note
        assert ".weight; compressors fixed_point:bits=8" in note
