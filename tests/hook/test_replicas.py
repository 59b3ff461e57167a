"""Replicas stay equal in bits at every step of a longer run."""

from __future__ import annotations

import hashlib

import torch
from tests.hook.models import digest, everything
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

LONG = ["quantize:bits=4,rounding=stochastic", "sign", "fixed_point:bits=8"]


def many_steps(rank, world_size, steps, threads):
    """A hash of all the parameters of all steps, and of the last step, per coder."""
    torch.set_num_threads(threads[rank])
    try:
        return {spec: run(rank, spec, n) for spec, n in steps.items()}
    finally:
        torch.set_num_threads(1)


def run(rank, spec, count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008)
    state = ck.register(ddp, spec, exempt=None, seed=7)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    steps, losses = [], []
    for _ in range(count):
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        steps.append(digest(ddp))
        losses.append(loss.item())
    assert state.step == count
    assert count < 50 or losses[-1] < 0.9 * losses[0]
    return hashlib.sha256("".join(steps).encode()).hexdigest(), steps


def test_replicas_are_equal_at_every_step(ranks):
    counts = dict.fromkeys(everything(), 5) | dict.fromkeys(LONG, 50)
    results = ranks.run(3, many_steps, counts, (1, 4, 2))
    for spec, count in counts.items():
        first = results[0][spec]
        assert len(set(first[1])) == count, spec
        for other in results[1:]:
            assert other[spec] == first, spec
