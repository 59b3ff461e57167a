"""A long run as it happens: ranks out of step, accumulated gradients, a rank killed in
the middle of a backward pass, and a resume from what each rank had saved.

`pytest` makes 40 steps; ``pytest -m slow`` (``make soak``) makes 2000, or SOAK_STEPS.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import digest
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import commkern as ck
from commkern.cli.demo_model import CharacterGPT
from commkern.testing import Died

WORLD_SIZE = 4
SYMBOLS = 64
LENGTH = 12
KILLED = 2
LONGEST_DELAY_S = 0.003


@dataclass(frozen=True)
class Soak:
    """Where the run stops, saves and is killed."""

    steps: int
    save_every: int
    kill_at: int
    folder: str
    compressor: str = "quantize:bits=4"

    def file(self, step: int, rank: int) -> Path:
        return Path(self.folder) / f"step{step}-rank{rank}.pt"


class Trainer:
    """One rank: the model, its optimizer, the hook, and the ledger in fp64."""

    def __init__(self, rank: int, soak: Soak, kill_at: int | None) -> None:
        self.rank, self.soak, self.kill_at = rank, soak, kill_at
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(CharacterGPT(SYMBOLS), bucket_cap_mb=0.5)
        parameters = self.ddp.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        self.state = ck.CompressionState(None, soak.compressor, module=self.ddp)
        self.ddp.register_comm_hook(self, recording_hook)
        named = self.ddp.module.named_parameters()
        self.names = {id(p): name for name, p in named}
        self.given = self._zeros()
        self.got = self._zeros()

    def _zeros(self) -> dict[str, torch.Tensor]:
        named = self.ddp.module.named_parameters()
        return {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in named}

    def step(self, step: int, delays: random.Random | None) -> None:
        pieces = random.Random(step).randint(1, 3)
        self.optimizer.zero_grad()
        for piece in range(pieces):
            if delays is not None:
                time.sleep(delays.uniform(0, LONGEST_DELAY_S))
            last = piece == pieces - 1
            with nullcontext() if last else self.ddp.no_sync():
                self._loss(step, piece).backward()
        for name, p in self.ddp.module.named_parameters():
            self.got[name] += p.grad.reshape(-1)
        self.optimizer.step()

    def _loss(self, step: int, piece: int) -> torch.Tensor:
        """Ids that a fixed rule makes from the ones before, from a random start."""
        seed = (step * 3 + piece) * WORLD_SIZE + self.rank
        start = torch.randint(
            SYMBOLS, (2, 1), generator=torch.Generator().manual_seed(seed)
        )
        ids = (start + 5 * torch.arange(LENGTH + 1) ** 2) % SYMBOLS
        logits = self.ddp(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def save(self, step: int) -> None:
        saved = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hook": self.state.state_dict(),
            "given": self.given,
            "got": self.got,
        }
        torch.save(saved, self.soak.file(step, self.rank))

    def load(self, step: int) -> None:
        saved = torch.load(self.soak.file(step, self.rank))
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["hook"])
        self.given, self.got = saved["given"], saved["got"]


def recording_hook(trainer, bucket):
    """Adds up what this rank gives, and kills it in the middle of a backward pass."""
    if trainer.state.step == trainer.kill_at and bucket.index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        trainer.given[trainer.names[id(p)]] += gradient.reshape(-1)
    return ck.compression_hook(trainer.state, bucket)


def train(
    rank: int, world_size: int, soak: Soak, start: int, delayed: bool, kill: bool
) -> Any:
    """The rank's digest, ledger and last step; or what it saw of the killed one."""
    trainer = Trainer(rank, soak, soak.kill_at if kill and rank == KILLED else None)
    if start:
        trainer.load(start)
    delays = random.Random(100 * start + rank) if delayed else None
    try:
        for step in range(start, soak.steps):
            trainer.step(step, delays)
            if delayed and (step + 1) % soak.save_every == 0:
                trainer.save(step + 1)
    except ck.PeerLost as lost:
        return lost.rank, lost.step
    return digest(trainer.ddp), trainer.state.step, ledger_error(trainer)


def ledger_error(trainer: Trainer) -> float:
    """Largest relative error, over parameters, of what the ledger says."""
    residuals = trainer.state.state_dict()["residuals"]
    errors = []
    for name, got in trainer.got.items():
        left = residuals[name].double() if name in residuals else torch.zeros_like(got)
        both = torch.stack([trainer.given[name], left])
        dist.all_reduce(both)
        wanted, left = both / WORLD_SIZE
        errors.append((got + left - wanted).norm() / wanted.norm())
    return float(torch.stack(errors).max())


def soak(ranks: Any, plan: Soak, timeout_s: float) -> None:
    def run(start: int, delayed: bool, kill: bool) -> list[Any]:
        return ranks.run(
            WORLD_SIZE, train, plan, start, delayed, kill,
            timeout_s=timeout_s, expect_death=(KILLED,) if kill else (),
        )  # fmt: skip

    straight = run(0, False, False)
    killed = run(0, True, True)
    for rank, result in enumerate(killed):
        expected = Died(-signal.SIGKILL) if rank == KILLED else (KILLED, plan.kill_at)
        assert result == expected
    resumed = run(plan.kill_at // plan.save_every * plan.save_every, True, False)
    assert len({bits for bits, _, _ in [*resumed, *straight]}) == 1
    for _, step, error in [*resumed, *straight]:
        assert step == plan.steps
        assert error < 1e-5


def plan(steps: int, folder: Path) -> Soak:
    return Soak(
        steps, save_every=steps // 8, kill_at=steps * 5 // 9, folder=str(folder)
    )


@pytest.mark.timeout(300)
def test_forty_steps(ranks, tmp_path):
    soak(ranks, plan(40, tmp_path), 120)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_thousand_steps(ranks, tmp_path):
    steps = int(os.environ.get("SOAK_STEPS", "2000"))
    soak(ranks, plan(steps, tmp_path), 2400)
