"""What each rank handed to the hook and what came back, and what must hold of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commkern as ck

CODERS = ["identity", "quantize:bits=8", "quantize:bits=4", "sign"]

MODES = {
    "default": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph and views": {"static_graph": True, "gradient_as_bucket_view": True},
    "batched_grad_copy": {"batched_grad_copy": True},
}


class Chain(nn.Module):
    """Bias-free square layers, used in another order than defined."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward; the reentrant form runs an inner one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chain(64, 2) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Heads(nn.Module):
    """A body and two heads; a forward pass uses the heads that it is told to use."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(40, 40)
        self.a = nn.Linear(40, 40)
        self.b = nn.Linear(40, 40)

    def forward(self, x, heads="ab"):
        x = torch.tanh(self.body(x))
        return sum(getattr(self, head)(x) for head in heads)


def heads(seed=0, **ddp) -> DistributedDataParallel:
    torch.manual_seed(seed)
    ddp.setdefault("bucket_cap_mb", 0.005)
    return DistributedDataParallel(Heads(), **ddp)


def descend(module) -> None:
    """Plain SGD, with gradients given back."""
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    module.zero_grad()


class Recorder:
    """Stands between DDP and the hook: keeps a copy of every bucket that comes in.

    ``steps`` holds for each step the local gradients by name, in float64, and
    ``buckets`` the names in each of its buckets. `note` adds what ``.grad`` holds to
    ``outputs``. `summary` is what `check_ledger` wants of every rank.
    """

    def __init__(self, ddp: DistributedDataParallel, spec: str, **settings) -> None:
        hook = settings.pop("hook", recorded_hook)
        settings.setdefault("exempt", None)
        self.state = ck.CompressionState(None, spec, module=ddp, **settings)
        self.names = {id(p): n for n, p in ddp.module.named_parameters()}
        self.module = ddp.module
        self.steps: list[dict[str, torch.Tensor]] = [{}]
        self.buckets: list[list[list[str]]] = [[]]
        self.outputs: dict[str, torch.Tensor] = {}
        ddp.register_comm_hook(self, hook)

    def record(self, bucket) -> None:
        names = [self.names[id(p)] for p in bucket.parameters()]
        local = [g.double().clone() for g in bucket.gradients()]
        self.steps[-1].update(zip(names, local, strict=True))
        self.buckets[-1].append(names)
        if bucket.is_last():
            self.steps.append({})
            self.buckets.append([])

    def note(self) -> None:
        """Add the gradients of the step to the sum of results."""
        for name, p in self.module.named_parameters():
            if p.grad is not None:
                self.outputs[name] = self.outputs.get(name, 0) + p.grad.double()

    def summary(self):
        local: dict[str, torch.Tensor] = {}
        for step in self.steps:
            for name, gradient in step.items():
                local[name] = local.get(name, 0) + gradient
        return local, self.outputs, self.state.state_dict()["residuals"]


def recorded_hook(state, bucket):
    state.record(bucket)
    return ck.compression_hook(state.state, bucket)


def check_ledger(summaries, what="", tolerance=1e-5) -> None:
    """sum of results + mean of residuals = sum of mean gradients, by name."""
    assert summaries[0][1]
    for name, reduced in summaries[0][1].items():
        wanted = sum(local[name] for local, _, _ in summaries) / len(summaries)
        left = sum(
            residuals[name].double().reshape(wanted.shape)
            for _, _, residuals in summaries
            if name in residuals
        ) / len(summaries)
        error = (reduced + left - wanted).norm() / wanted.norm()
        assert error < tolerance, (what, name, error)


def mean_of(locals_: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The float64 mean over ranks of one step's local gradients."""
    return {
        name: sum(each[name] for each in locals_) / len(locals_) for name in locals_[0]
    }


def check_lossless(outputs, locals_) -> None:
    """Results are the float64 mean within 1e-6 of its largest element."""
    for name, mean in mean_of(locals_).items():
        error = (outputs[name].double() - mean).abs().max()
        assert error <= 1e-6 * mean.abs().max(), (name, error)


def check_quantiser_bound(outputs, locals_, bits: int, block: int = 128) -> None:
    """First step of round-to-nearest: half a step of each rank's block in the first
    pass, half a step of the sum's block in the second, averaged."""
    world_size, levels = len(locals_), 2 ** (bits - 1) - 1
    for name, mean in mean_of(locals_).items():
        peaks = sum(_peaks(each[name], block) for each in locals_) / levels / 2
        coded_sum = _peaks(world_size * mean, block) + peaks
        bound = (peaks + coded_sum / levels / 2) / world_size
        error = (outputs[name].double() - mean).reshape(-1, block).abs()
        assert (error <= bound * (1 + 1e-5) + 1e-12).all(), name


def _peaks(gradient: torch.Tensor, block: int) -> torch.Tensor:
    return gradient.reshape(-1, block).abs().amax(dim=1, keepdim=True)
