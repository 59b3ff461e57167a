"""What each rank of the demo does: one training run under one compressor."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.nn.parallel import DistributedDataParallel

from commkern.cli.demo_data import Corpus, Tokens
from commkern.cli.demo_model import CONTEXT, CharacterGPT
from commkern.errors import ReplicasDiffer
from commkern.rank_worker import send_message
from commkern.sync import check_sync

_EVALUATION_WINDOWS = 256
_EVALUATION_BATCH = 32
_MESSAGE_EVERY_S = 0.1
_UNTIMED_STEPS = 5
_WARM_UP_STEPS = 30  # of the learning rate


@dataclass(frozen=True)
class Settings:
    """One run. ``compressor`` is a string, or "none" for DDP without a hook."""

    compressor: str
    steps: int
    batch_size: int
    optimizer: str
    learning_rate: float
    seed: int
    feedback: str | None


@dataclass
class Result:
    """What a run measured; losses are means over ranks, in nats per character."""

    compressor: str
    losses: list[float]
    held_out_loss: float
    bytes_per_step: float
    bytes_plain: float
    step_ms: float
    replicas_equal: bool
    parameters: int
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def train_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)

    @property
    def compression_factor(self) -> float | None:
        return self.bytes_plain / self.bytes_per_step if self.bytes_per_step else None


def train(rank: int, world_size: int, settings: Settings, corpus: Corpus) -> Result:
    """Train one configuration; every rank returns the same losses and checks."""
    begin = time.perf_counter()
    torch.manual_seed(settings.seed)
    model = CharacterGPT(corpus.symbols)
    ddp = DistributedDataParallel(model)
    state = _register(ddp, settings)
    losses, times = _steps(rank, ddp, settings, corpus.train)
    mean_losses = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean_losses)
    parameters = sum(p.numel() for p in model.parameters())
    plain = 2 * (world_size - 1) / world_size * 4 * parameters
    stats = {} if state is None else _plain_values(state.stats())
    return Result(
        compressor=settings.compressor,
        losses=(mean_losses / world_size).tolist(),
        held_out_loss=_held_out_loss(rank, world_size, model, corpus.held_out),
        bytes_per_step=plain if state is None else float(stats["bytes_sent"]),
        bytes_plain=plain,
        step_ms=1e3 * float(np.median(times[_UNTIMED_STEPS:] or times)),
        replicas_equal=_replicas_equal(model),
        parameters=parameters,
        seconds=time.perf_counter() - begin,
        stats=stats,
    )


def _register(ddp: DistributedDataParallel, settings: Settings) -> Any:
    if settings.compressor == "none":
        return None
    import commkern as ck

    return ck.register(
        ddp, settings.compressor, feedback=settings.feedback, seed=settings.seed
    )


def _steps(
    rank: int, ddp: DistributedDataParallel, settings: Settings, tokens: Tokens
) -> tuple[list[float], list[float]]:
    optimizer = _optimizer(ddp, settings)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP_STEPS)
    )
    losses, times = [], []
    message_at = 0.0
    for step in range(settings.steps):
        begin = time.perf_counter()
        ids = _batch(tokens, settings, step, rank)
        optimizer.zero_grad()
        loss = _loss(ddp, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
        now = time.perf_counter()
        times.append(now - begin)
        if rank == 0 and (now >= message_at or step == settings.steps - 1):
            send_message((step + 1, losses[-1], 1e3 * times[-1]))
            message_at = now + _MESSAGE_EVERY_S
    return losses, times


def _optimizer(ddp: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    parameters, rate = ddp.parameters(), settings.learning_rate
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, fused=True)
    return torch.optim.AdamW(parameters, lr=rate, fused=True)


def _batch(tokens: Tokens, settings: Settings, step: int, rank: int) -> Tensor:
    """The data order depends on the seed, the step and the rank, on nothing else."""
    random = np.random.default_rng((settings.seed, step, rank))
    starts = random.integers(0, len(tokens) - CONTEXT, settings.batch_size)
    return _windows(tokens, starts)


def _windows(tokens: Tokens, starts: Any) -> Tensor:
    places = np.asarray(starts)[:, None] + np.arange(CONTEXT + 1)
    return torch.from_numpy(tokens[places].astype(np.int64))


def _loss(model: nn.Module, ids: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(ids[:, :-1])
    targets = ids[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction=reduction)


@torch.no_grad()
def _held_out_loss(
    rank: int, world_size: int, model: nn.Module, tokens: Tokens
) -> float:
    """Mean over fixed, evenly spaced windows; the ranks share the work."""
    starts = np.linspace(0, len(tokens) - CONTEXT - 1, _EVALUATION_WINDOWS)
    mine = starts.astype(np.int64)[rank::world_size]
    total = torch.zeros(1, dtype=torch.float64)
    for first in range(0, len(mine), _EVALUATION_BATCH):
        ids = _windows(tokens, mine[first : first + _EVALUATION_BATCH])
        total += _loss(model, ids, reduction="sum").double()
    dist.all_reduce(total)
    return total.item() / (_EVALUATION_WINDOWS * CONTEXT)


def _replicas_equal(model: nn.Module) -> bool:
    try:
        check_sync(model)
    except ReplicasDiffer:
        return False
    return True


def _plain_values(stats: Any) -> dict[str, Any]:
    wanted = (int, float, str, bool)
    return {key: value for key, value in stats.items() if isinstance(value, wanted)}
