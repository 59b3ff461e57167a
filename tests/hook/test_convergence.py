"""Models learn through the hook as well as without it."""

from __future__ import annotations

import pytest
import torch
from tests.laws import EVERY
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear rule of 10 classes with noise."""
    rule = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 64, generator=generator)
    noise = 2 * torch.randn(count, 10, generator=generator)
    return x, (x @ rule + noise).argmax(dim=1)


def batches(rank, world_size, steps):
    """A rank's shares of random batches, the same ones for every model."""
    x, y = samples(4096, seed=1)
    order = torch.Generator().manual_seed(2)
    for _ in range(steps):
        batch = torch.randint(4096, (64 * world_size,), generator=order)
        batch = batch[64 * rank : 64 * (rank + 1)]
        yield x[batch], y[batch]


def sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.LayerNorm(256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.LayerNorm(256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def accuracy(rank, world_size, spec):
    """Held-out accuracy after 300 steps, and what the state says of each parameter."""
    ddp = DistributedDataParallel(mlp())
    state = ck.register(ddp, spec) if spec else None
    optimizer = sgd(ddp)
    for x, y in batches(rank, world_size, 300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    x, y = samples(4096, seed=3)
    with torch.no_grad():
        right = (ddp.module(x).argmax(dim=1) == y).double().mean().item()
    return right, state.report() if state else {}


def test_an_mlp_learns_as_without_compression(ranks):
    dense, _ = ranks.run(2, accuracy, None)[0]
    assert dense > 0.6  # guessing: 0.1
    for spec in ("quantize:bits=8", "quantize:bits=4", "sign"):
        first, second = ranks.run(2, accuracy, spec)
        assert first == second
        right, report = first
        assert right >= dense - 0.03, (spec, right, dense)
        # Layers 0, 3 and 6 are linear, 1 and 4 norms.
        coded = {"0.weight", "3.weight", "6.weight"}
        assert len(report) == 10
        assert {name for name, coder in report.items() if coder != "identity"} == coded


class Side(nn.Module):
    """Equal models side by side, each with a loss of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.models = nn.ModuleList(small_mlp() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(x) for model in self.models])


def small_mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*layers)


def side_by_side(rank, world_size, specs, feedback):
    """Held-out accuracy of each after 150 steps, and its parameters."""
    ddp = DistributedDataParallel(Side(len(specs)))
    coders = {f"models.{i}.*": spec for i, spec in enumerate(specs)}
    state = ck.register(ddp, coders, feedback=feedback)
    optimizer = sgd(ddp)
    for x, y in batches(rank, world_size, 150):
        optimizer.zero_grad()
        outputs, wanted = ddp(x), y.repeat(len(specs))
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), wanted)
        (loss * len(specs)).backward()
        optimizer.step()
    x, y = samples(4096, seed=3)
    with torch.no_grad():
        right = (ddp.module(x).argmax(dim=2) == y).double().mean(dim=1).tolist()
    report = state.report()
    for layer in (0, 3):
        used = [report[f"models.{i}.{layer}.weight"] for i in range(len(specs))]
        assert used == [str(ck.compressor(spec)) for spec in specs]
    return right, [model[0].weight.detach() for model in ddp.module.models]


FED = [
    "fixed_point:bits=8",
    "float8",
    "nvfp4",
    "microscaling:format=mxfp4",
    "codebook",
    "natural",
    "rotated",
    "qsgd",
    "twobit:threshold=0.05",
]


# Errors of ternary are larger than what feedback can make up for; without it, its noise
# costs more than that of the others.
@pytest.mark.parametrize(
    ("specs", "feedback", "loss"),
    [(FED, "error", 0.03), (["ternary"], None, 0.06)],
    ids=["feedback", "ternary"],
)
def test_every_family_learns_as_without_compression(ranks, specs, feedback, loss):
    results = ranks.run(2, side_by_side, ["identity", *specs], feedback)
    (dense, *others), weights = results[0]
    for number, weight in enumerate(weights):
        assert torch.equal(weight, results[1][1][number])
        assert not any(torch.equal(weight, other) for other in weights[:number])
    assert dense > 0.6  # guessing: 0.1
    found = dict(zip(specs, others, strict=True))
    assert min(others) >= dense - loss, (dense, found)


def tiny_layers(rank, world_size, specs):
    """How far each 7-element layer has moved after 50 steps, with nothing exempt."""
    moved = {}
    for spec in specs:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(7, 1, bias=False) for _ in range(4))
        before = [p.detach().clone() for p in model.parameters()]
        ddp = DistributedDataParallel(Sum(model))
        feedback = "error" if ck.compressor(spec).supports_feedback else None
        ck.register(ddp, spec, exempt=None, feedback=feedback)
        x = torch.linspace(-1, 1, 7).reshape(1, 7) * (rank + 1)
        for _ in range(50):
            ddp.zero_grad()
            ddp(x).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
        moved[spec] = [
            (p.detach() - old).abs().max().item()
            for p, old in zip(model.parameters(), before, strict=True)
        ]
    return moved


class Sum(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x) - 3).square().sum() for layer in self.layers)


@pytest.mark.timeout(300)
def test_every_compressor_moves_the_smallest_layers(ranks):
    for moved in ranks.run(2, tiny_layers, EVERY, timeout_s=240):
        for spec, distances in moved.items():
            assert min(distances) > 0.01, (spec, distances)
