"""Lightning with compressed gradients, and exact resume.

    python examples/lightning_ddp.py --epochs 2
    python examples/lightning_ddp.py --epochs 4  # goes on from the checkpoint

Lightning starts the second process itself. The second run ends with the bits of one
that was never interrupted: compare with a run under another ``--folder``.

A callback registers the hook, as `DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`
wants a state before there is a module or a process group, and ignores both on CPUs.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.utils.data import DataLoader, TensorDataset

import commkern as ck


class CompressedGradients(Callback):
    """Reduces gradients through a compressor; checkpoints hold every rank's state."""

    def __init__(self, compressor: str, **settings: Any) -> None:
        self.compressor, self.settings = compressor, settings
        self.loaded: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        ddp = trainer.strategy.model
        self.state = ck.register(ddp, self.compressor, **self.settings)
        if self.loaded:
            self.state.load_state_dict(self.loaded[trainer.global_rank])

    def state_dict(self) -> dict[str, Any]:
        """Called on every rank; what rank 0 returns is saved."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self.state.state_dict())
        return {"ranks": ranks}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.loaded = saved["ranks"]

    def on_fit_end(self, trainer: lightning.Trainer, model: Any) -> None:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        factor = self.state.stats()["compression_factor"]
        print(
            f"rank {trainer.global_rank}: {self.state.step} steps, "
            f"{factor:.2f} times fewer bytes, parameters {digest.hexdigest()[:16]}",
            flush=True,
        )


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--compressor", default="quantize:bits=8")
    args = parser.parse_args()

    lightning.seed_everything(0)
    x = torch.randn(1024, 64)
    data = TensorDataset(x, torch.sin(3 * x[:, :8]))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=args.epochs,
        callbacks=[
            CompressedGradients(args.compressor),
            ModelCheckpoint(args.folder, save_last=True, save_top_k=0),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(data, batch_size=32, shuffle=True)
    last = args.folder / "last.ckpt"
    trainer.fit(Model(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
