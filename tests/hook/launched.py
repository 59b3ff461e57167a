"""A training script as users start it: by torchrun, or by mp.spawn with ``spawn``.

Each rank writes what it found to ``<directory>/<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

WORLD_SIZE = 2


def train(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    state = ck.register(ddp, "quantize:bits=8")
    gradients = []
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.full((1, 64), 127.0 * (rank + 1) + step)).sum().backward()
        gradients.append(ddp.module.weight.grad.unique().tolist())
    found = {
        "gradients": gradients,
        "step": state.step,
        "factor": state.stats()["compression_factor"],
        "world_size": dist.get_world_size(),
    }
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def spawned(rank: int, port: int, directory: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
    }
    train(directory)


if __name__ == "__main__":
    if sys.argv[2:]:
        mp.spawn(spawned, (int(sys.argv[2]), sys.argv[1]), WORLD_SIZE)
    else:
        train(sys.argv[1])
