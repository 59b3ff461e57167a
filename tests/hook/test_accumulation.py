"""Gradient accumulation: the hook sees what DDP synchronises, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.hook.models import batch, digest, make
from tests.hook.recording import MODES, Recorder, check_ledger
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def boundaries(rank, world_size, order):
    """Two micro-batches with gradients 1 and 10 times (rank + 1); which of them is
    outside no_sync, and in which passes."""
    results = []
    for spec in (None, "identity"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        recorder = Recorder(ddp, spec) if spec else None
        x = torch.ones(1, 2) * (rank + 1)
        for scale, forward, backward in order:
            with contextlib.nullcontext() if forward else ddp.no_sync():
                loss = ddp(scale * x).sum()
            with contextlib.nullcontext() if backward else ddp.no_sync():
                loss.backward()
        results.append(ddp.module.weight.grad.clone())
    inputs = [step["weight"] for step in recorder.steps if step]
    return results, inputs, recorder.state.step


# (gradient, forward pass synchronised, backward pass synchronised) per micro-batch
RIGHT = [(1.0, False, False), (10.0, True, True)]
FIRST = [(1.0, True, True), (10.0, False, False)]
BACKWARD_ONLY = [(1.0, True, False), (10.0, True, True)]
FORWARD_ONLY = [(1.0, False, True), (10.0, True, True)]
NEITHER = [(1.0, False, False), (10.0, False, False)]


def test_no_sync_leaves_hook_and_state_alone(ranks):
    for rank, (results, inputs, step) in enumerate(ranks.run(2, boundaries, RIGHT)):
        assert [x.tolist() for x in inputs] == [[[11.0 * (rank + 1)] * 2]]
        assert step == 1
        for gradient in results:
            assert torch.equal(gradient, torch.full((1, 2), 16.5))


@pytest.mark.parametrize(
    ("order", "calls", "expected"),
    [
        (FIRST, 1, (11.5, 21.5)),  # the second half stays local: ranks drift apart
        (BACKWARD_ONLY, 2, (16.5, 16.5)),  # the forward pass decides
        (FORWARD_ONLY, 1, (16.5, 16.5)),
        (NEITHER, 0, (11.0, 22.0)),
    ],
    ids=["first", "backward_only", "forward_only", "neither"],
)
def test_any_other_boundary_is_as_without_a_hook(ranks, order, calls, expected):
    everything = ranks.run(2, boundaries, order)
    for (results, inputs, step), wanted in zip(everything, expected, strict=True):
        assert len(inputs) == step == calls
        for gradient in results:
            assert torch.equal(gradient, torch.full((1, 2), wanted))


def accumulate(rank, world_size, mode, spec):
    """Updates after 1, 3, 2, 1, 1 and 4 micro-batches; two of them accumulate on top of
    gradients that were synchronised already. With DDP's own reduction and with ours."""
    digests = []
    for coder in (None, spec):
        ddp = make(**MODES[mode])
        recorder = Recorder(ddp, coder) if coder else None
        step = 0
        for update, count in enumerate([1, 3, 2, 1, 1, 4]):
            if update not in (3, 4):
                ddp.zero_grad()
            for micro in range(count):
                last = micro == count - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    ddp(batch(rank, step)).square().mean().backward()
                step += 1
            if recorder:
                recorder.note()
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
        digests.append(digest(ddp))
    return digests, recorder.summary(), recorder.state.step


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_that_changes_in_the_middle(ranks, mode):
    for digests, _, step in ranks.run(2, accumulate, mode, "identity"):
        assert digests[0] == digests[1]
        assert step == 6
    results = ranks.run(2, accumulate, mode, "quantize:bits=4")
    assert results[0][0][1] == results[1][0][1]
    check_ledger([summary for _, summary, _ in results], mode)


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b = torch.nn.Linear(8, 8)

    def forward(self, x, use_b):
        return self.a(x) + (self.b(x) if use_b else 0)


def used_before_the_boundary(rank, world_size, spec):
    """b is used by rank 0 alone, in a micro-batch that is not synchronised."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Heads(), find_unused_parameters=True)
    if spec:
        Recorder(ddp, spec)
    gradients = []
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch(rank, 0, 8), rank == 0).square().mean().backward()
        ddp(batch(rank, 1, 8), False).square().mean().backward()
        gradients += [p.grad.clone() for p in ddp.parameters()]
    return gradients


def test_a_parameter_used_only_before_the_boundary(ranks):
    plain = ranks.run(2, used_before_the_boundary, None)
    hooked = ranks.run(2, used_before_the_boundary, "identity")
    for one, other in zip(plain, hooked, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*hooked, strict=True))
    assert hooked[0][2].abs().max() > 0


def static_graph(rank, world_size):
    """A first step of two micro-batches, without a hook and with one."""
    outcomes = []
    for hooked in (False, True):
        ddp = make(static_graph=True)
        if hooked:
            ck.register(ddp, "identity")
        try:
            with ddp.no_sync():
                ddp(batch(rank, 0)).square().mean().backward()
            ddp(batch(rank, 1)).square().mean().backward()
        except RuntimeError as error:
            outcomes.append(str(error).partition(" at ")[0])
        else:
            outcomes.append(digest(ddp))
    return outcomes


def test_the_first_step_of_a_static_graph_is_as_without_a_hook(ranks):
    """That is, DDP fails (docs/support.md)."""
    for plain, hooked in ranks.run(2, static_graph):
        assert hooked == plain
