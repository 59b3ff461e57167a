"""A model with embeddings whose gradients are sparse, or dense; its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

ROWS = 40


class Words(nn.Module):
    """Two embeddings with layers between and behind them: the second one's gradient is
    there first, the other one's last."""

    def __init__(self, *, sparse: bool = True, kind: Any = nn.Embedding, **kw: Any):
        super().__init__()
        self.words = kind(ROWS, 8, sparse=sparse, **kw)
        self.inner = nn.Linear(8, 32)
        self.tags = kind(ROWS, 6, sparse=sparse, **kw)
        self.out = nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.inner(self.words(x)))
        return self.out(inner) * self.tags(3 * x % ROWS)


def make(dtype: torch.dtype = torch.float32, seed: int = 0, **kw: Any) -> Any:
    """Words in DDP; settings of DDP under ``ddp``."""
    ddp = {"bucket_cap_mb": 0.001} | kw.pop("ddp", {})
    torch.manual_seed(seed)
    return DistributedDataParallel(Words(**kw).to(dtype), **ddp)


def batch(rank: int, step: int) -> torch.Tensor:
    """Some words twice and more; each rank knows some of its own."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS // 2, (4, 6), generator=generator) + 5 * rank


def pairs(rank: int, step: int) -> torch.Tensor:
    """No word more than twice: its sum has one order only."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    some = torch.randperm(ROWS, generator=generator)
    return torch.cat([some[:15], some[:9]]).view(4, 6)


def gradients(ddp: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in ddp.module.named_parameters()}


def dense(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: g.to_dense() if g.is_sparse else g for n, g in found.items()}


def train(ddp: Any, rank: int, steps: range, batch: Any = batch) -> list[Any]:
    """Plain SGD by hand; the gradients of every step."""
    seen = []
    for step in steps:
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        seen.append(gradients(ddp))
        with torch.no_grad():
            for name, gradient in dense(seen[-1]).items():
                ddp.module.get_parameter(name).sub_(0.1 * gradient)
    return seen


def same_bits(ones: list[Any], others: list[Any]) -> bool:
    """Whether the gradients of all steps are equal as dense tensors."""
    return len(ones) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        for a, b in zip(map(dense, ones), map(dense, others), strict=True)
    )


def hooked(ddp: Any, compressor: Any = "identity", **settings: Any) -> Any:
    return ck.register(ddp, compressor, exempt=None, **settings)
