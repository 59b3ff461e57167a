"""Replicas stay equal in bits at every step of a longer run."""

from __future__ import annotations

import hashlib

import pytest
import torch
from tests.hook.models import digest
from tests.laws import EVERY
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

ALONE = ["quantize:bits=4,rounding=stochastic", "sign"]
STEPS = 50


def many_steps(rank, world_size, specs, threads):
    """A hash of all the parameters after each step, per coder."""
    torch.set_num_threads(threads[rank])
    try:
        return {spec: run(rank, spec) for spec in specs}
    finally:
        torch.set_num_threads(1)


def run(rank, spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008)
    state = ck.register(ddp, spec, exempt=None, seed=7)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    steps, losses = [], []
    for _ in range(STEPS):
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        steps.append(digest(ddp))
        losses.append(loss.item())
    assert state.step == STEPS
    assert losses[-1] < 0.9 * losses[0]
    return steps


def hash_of(parameter: torch.Tensor) -> str:
    return hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()


def test_replicas_are_equal_at_every_step(ranks):
    results = ranks.run(3, many_steps, ALONE, (1, 4, 2))
    for spec in ALONE:
        first = results[0][spec]
        assert len(set(first)) == STEPS, spec
        for other in results[1:]:
            assert other[spec] == first, spec


class Layers(nn.Module):
    """A layer for each compressor, each with a loss of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 40, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = [
            (torch.tanh(layer(x)) - x.roll(i, 1)[:, :40]).square().mean()
            for i, layer in enumerate(self.layers)
        ]
        return torch.stack(losses).sum()


def all_at_once(rank, world_size, specs, feedback, threads):
    """Every layer's hash at every step, one layer for each compressor."""
    torch.set_num_threads(threads[rank])
    try:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Layers(len(specs)), bucket_cap_mb=0.05)
        names = [name for name, _ in ddp.module.named_parameters()]
        coders = dict(zip(names, specs, strict=True))
        state = ck.register(ddp, coders, exempt=None, seed=7, feedback=feedback)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank)
        steps = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(16, 64, generator=generator)).backward()
            optimizer.step()
            steps.append([hash_of(p) for p in ddp.parameters()])
    finally:
        torch.set_num_threads(1)
    used = state.report()
    return [used[name] for name in names], list(zip(*steps, strict=True))


FED = [spec for spec in EVERY if ck.compressor(spec).supports_feedback]
OTHERS = [spec for spec in EVERY if spec not in FED]


@pytest.mark.parametrize(
    ("specs", "feedback"), [(FED, "error"), (OTHERS, None)], ids=["feedback", "none"]
)
def test_replicas_are_equal_under_every_compressor(ranks, specs, feedback):
    results = ranks.run(3, all_at_once, specs, feedback, (1, 2, 1))
    used, layers = results[0]
    assert used == [str(ck.compressor(spec)) for spec in specs]
    for number, (spec, hashes) in enumerate(zip(specs, layers, strict=True)):
        assert len(set(hashes)) == STEPS, spec
        for _, others in results[1:]:
            assert others[number] == hashes, spec
