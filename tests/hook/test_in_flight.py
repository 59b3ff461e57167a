"""Many buckets on their way at once, and one that fails in the middle."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from tests.hook.models import digest
from tests.hook.recording import Recorder, check_ledger
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
    """20 steps: what the recorder has of them, the parameters, and what is left of the
    last step's gradients."""
    ddp = deep()
    recorder = Recorder(ddp, spec)
    for _ in range(20):
        step_of(ddp, rank)
        recorder.note()
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.01 * p.grad
    buckets = [len(step) for step in recorder.buckets[:20]]
    return recorder.summary(), digest(ddp), recorder.state.step, buckets


@pytest.mark.parametrize("spec", ["identity", "quantize:bits=8", "fixed_point:bits=8"])
def test_many_buckets(ranks, spec):
    first, second = ranks.run(2, many, spec)
    check_ledger([first[0], second[0]], spec)
    assert first[1:] == second[1:]
    assert first[2:] == (20, [1] + 19 * [LAYERS])


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
    started = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - another on each rank
        step_of(ddp, rank)
    elapsed = time.monotonic() - started
    error = caught.value
    return type(error).__name__, str(error), getattr(error, "__notes__", []), elapsed


@pytest.mark.parametrize("number", range(4), ids="round {}".format)
def test_a_failure_in_any_stage_ends_both_ranks(ranks, number):
    results = ranks.run(2, failing, number, group_timeout_s=60, timeout_s=50)
    assert max(elapsed for *_, elapsed in results) < 20
    (kind, text, *_), (own, own_text, notes, _) = results
    assert kind == "PeerFailed"
    assert "rank 1" in text
    assert (own, own_text) == ("RuntimeError", "injected")
    if sys.version_info < (3, 11):
        assert notes == []
        return
    (note,) = notes
    assert "rank 1, step 2, bucket 4: " in note
    assert ".weight; compressors fixed_point:bits=8" in note
