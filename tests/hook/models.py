"""Models and training loops that the hook's tests share; run inside rank processes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


class ReverseOrder(nn.Module):
    """Layers used in another order than defined, so that DDP rebuilds its buckets."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Bucket:
    """The only bucket, of one parameter, as DDP hands it over."""

    def __init__(self, parameter: torch.Tensor, buffer: torch.Tensor) -> None:
        self._parameter = parameter
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameter]

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def make(
    width: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0, **ddp: Any
) -> DistributedDataParallel:
    """The same parameters on every rank; several buckets once rebuilt."""
    torch.manual_seed(seed)
    ddp.setdefault("bucket_cap_mb", 0.02)
    return DistributedDataParallel(ReverseOrder(width).to(dtype), **ddp)


def batch(rank: int, step: int, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, width, generator=generator)


def train(
    ddp: DistributedDataParallel,
    rank: int,
    steps: range,
    *,
    lr: float = 0.1,
    loss_scale: float = 1.0,
    after_backward: Callable[[int], None] | None = None,
) -> None:
    """Plain SGD by hand, so that nothing but the gradients has state."""
    dtype = next(ddp.parameters()).dtype
    for step in steps:
        ddp.zero_grad()
        loss = ddp(batch(rank, step).to(dtype)).square().mean()
        (loss * loss_scale).backward()
        if after_backward is not None:
            after_backward(step)
        with torch.no_grad():
            for p in ddp.parameters():
                if p.grad is not None and torch.isfinite(p.grad).all():
                    p -= lr * p.grad


def local_gradients(
    ddp: DistributedDataParallel, rank: int, step: int
) -> dict[str, torch.Tensor]:
    """What this rank's backward gives before any reduction."""
    model = ReverseOrder()
    model.load_state_dict(ddp.module.state_dict())
    model(batch(rank, step)).square().mean().backward()
    return {n: p.grad.double() for n, p in model.named_parameters()}


def digest(ddp: DistributedDataParallel) -> str:
    """A hash of every parameter's bits."""
    h = hashlib.sha256()
    for p in ddp.parameters():
        h.update(
            p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return h.hexdigest()


def everything() -> list[str]:
    """String forms that cover every registered compressor."""
    more = ["quantize:bits=4", "quantize:bits=4,rounding=stochastic"]
    return [*ck.compressors(), *more, "fixed_point:bits=8"]


def resumed(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[str, str]:
    """Digests of 6 steps in one go, and of 3 after a checkpoint behind the first 3."""
    ddp = make()
    state = ck.register(ddp, seed=5, **settings)
    train(ddp, rank, range(3))
    saved = {"hook": state.state_dict(), "model": ddp.module.state_dict()}
    file = io.BytesIO()
    torch.save(saved, file)
    train(ddp, rank, range(3, 6))
    file.seek(0)
    saved = torch.load(file)
    again = make(seed=99)
    again.module.load_state_dict(saved["model"])
    restored = ck.register(again, seed=5, **settings)
    restored.load_state_dict(saved["hook"])
    train(again, rank, range(3, 6))
    state.wait()
    assert restored.step == 6
    return digest(ddp), digest(again)


def steps_seen(
    rank: int, settings: dict[str, Any], steps: int = 6, **kwargs: Any
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """What every step had and left, by name: local gradients, results, the stores."""
    ddp = make(**kwargs)
    state = ck.register(ddp, **settings)
    seen: list[dict[str, dict[str, torch.Tensor]]] = []

    def note(step: int) -> None:
        saved = state.state_dict()
        results = {n: p.grad.clone() for n, p in ddp.module.named_parameters()}
        stores = {k: v for k, v in saved.items() if isinstance(v, dict)}
        seen.append({"given": local_gradients(ddp, rank, step), "results": results})
        seen[-1] |= stores

    train(ddp, rank, range(steps), after_backward=note)
    return seen
