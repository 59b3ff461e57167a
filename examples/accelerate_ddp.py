"""Hugging Face Accelerate with compressed gradients, and exact resume.

    torchrun --nproc-per-node 2 examples/accelerate_ddp.py --epochs 2
    torchrun --nproc-per-node 2 examples/accelerate_ddp.py --epochs 4  # goes on

The second run ends with the bits of one that was never interrupted: compare with that
of another ``--folder``. (On CPUs ``accelerate launch`` starts one process unless there
is MPI, hence torchrun.) Accelerate's own ``comm_hook`` setting knows torch's hooks,
not ours, so ours is registered on the module that ``prepare`` returns.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.utils.data import DataLoader, TensorDataset

import commkern as ck


def make_data() -> TensorDataset:
    x = torch.randn(1024, 64)
    return TensorDataset(x, torch.sin(3 * x[:, :8]))


def save_with(accelerator: Accelerator, state: ck.CompressionState) -> None:
    """Make save_state and load_state carry what compression holds back on each rank.

    Not `register_for_checkpointing`: it saves rank 0's object and loads it everywhere.
    """
    name = f"commkern_{accelerator.process_index}.pt"

    def save(models: list[nn.Module], weights: list[dict], folder: str) -> None:
        torch.save(state.state_dict(), Path(folder) / name)

    def load(models: list[nn.Module], folder: str) -> None:
        state.load_state_dict(torch.load(Path(folder) / name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--compressor", default="quantize:bits=8")
    args = parser.parse_args()

    set_seed(0)
    seeded = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seeded)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(make_data(), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = ck.register(model, args.compressor)  # after prepare, before training
    save_with(accelerator, state)

    done = [int(p.name.removeprefix("epoch-")) for p in args.folder.glob("epoch-*")]
    start = max(done, default=0)
    if start:
        accelerator.load_state(str(args.folder / f"epoch-{start}"))

    for epoch in range(start, args.epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(str(args.folder / f"epoch-{epoch + 1}"))

    digest = hashlib.sha256()
    for parameter in accelerator.unwrap_model(model).parameters():
        digest.update(parameter.detach().numpy().tobytes())
    factor = state.stats()["compression_factor"]
    print(
        f"rank {accelerator.process_index}: {args.epochs - start} of {args.epochs} "
        f"epochs, {state.step} steps, {factor:.2f} times fewer bytes, "
        f"parameters {digest.hexdigest()[:16]}",
        flush=True,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
