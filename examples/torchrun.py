"""DistributedDataParallel with compressed gradients, and exact resume.

    torchrun --nproc-per-node 2 examples/torchrun.py --steps 60
    torchrun --nproc-per-node 2 examples/torchrun.py --steps 120  # goes on from step 60

The second run ends with the bits of one that made all 120 steps without a stop: compare
the last column with that of a run under another ``--folder``.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of step and rank, so that a resumed run sees what it would have."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    return x, torch.sin(3 * x[:, :8])


def save(folder: Path, shared: dict[str, object], state: ck.CompressionState) -> None:
    """The model is the same on all ranks; what compression holds back is each rank's.

    ``shared.pt`` comes last: a folder that has it is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state.state_dict(), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(shared, folder / "unfinished.pt")
        (folder / "unfinished.pt").replace(folder / "shared.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--compressor", default="quantize:bits=8")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    state = ck.register(ddp, args.compressor)  # the one line

    start = 0
    for complete in args.folder.glob("step-*/shared.pt"):
        start = max(start, int(complete.parent.name.removeprefix("step-")))
    if start:
        folder = args.folder / f"step-{start}"
        shared = torch.load(folder / "shared.pt")
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        state.load_state_dict(torch.load(folder / f"rank{rank}.pt"))

    for step in range(start, args.steps):
        x, y = batch(step, rank)
        loss = F.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.save_every == 0:
            shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(args.folder / f"step-{step + 1}", shared, state)

    digest = hashlib.sha256()
    for parameter in ddp.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    factor = state.stats()["compression_factor"]
    print(
        f"rank {rank}: {state.step - start} of {state.step} steps, {factor:.2f} times "
        f"fewer bytes, parameters {digest.hexdigest()[:16]}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
