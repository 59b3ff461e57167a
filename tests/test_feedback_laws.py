"""What error feedback converges to, simulated in one process over whole tensors."""

from __future__ import annotations

import math

import pytest
import torch
from tests.laws import EVERY, random
from tests.simulation import two_shot

import commkern as ck

FED = [spec for spec in EVERY if ck.compressor(spec).supports_feedback]
BIASED = [
    spec
    for spec in FED
    if spec != "identity" and ck.compressor(spec).contraction("float32") is not None
]
NUMEL = 1000


def gradients(ranks: int) -> list[torch.Tensor]:
    return [random((NUMEL,), torch.float32, seed) for seed in range(ranks)]


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).double().mean(0)


def ef21(
    spec: str, given: list[torch.Tensor], steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results of every step, and the residuals at the end."""
    residuals = [torch.zeros(NUMEL) for _ in given]
    estimate, results = torch.zeros(NUMEL), []
    for step in range(steps):
        change = two_shot(spec, given, average=True, residuals=residuals, step=step)
        for residual, one in zip(residuals, given, strict=True):
            residual -= one
        estimate = estimate + change
        results.append(estimate)
    return results, residuals


@pytest.mark.parametrize("spec", FED)
def test_ef21_keeps_its_invariant(spec: str) -> None:
    """w = -mean of residuals, to one rounding a step of each of them."""
    steps, given = 20, gradients(3)
    results, residuals = ef21(spec, given, steps)
    largest = max(r.abs().max().item() for r in [*results, *residuals, *given])
    gap = (results[-1].double() + mean(residuals)).abs().max().item()
    assert gap <= 4 * steps * 2.0**-24 * largest


@pytest.mark.parametrize("spec", BIASED)
def test_ef21_converges_for_constant_gradients(spec: str) -> None:
    """By the factor that the contraction says where it says one below 1.

    With q^2 = 1 - delta a rank's distance E to its gradient becomes at most q E, and
    what it sends is at most (1 + q) E; the owner, who codes the sum of what is sent,
    adds at most q times that to his. So all distances together shrink by 2 q + q^2.
    """
    given = gradients(2)
    wanted, norm = mean(given), mean(given).norm().item()
    results, _ = ef21(spec, given, 60)
    gaps = [(r.double() - wanted).norm().item() for r in results]
    delta = ck.compressor(spec).contraction("float32")
    assert delta is not None
    q = math.sqrt(1 - delta)
    factor = 2 * q + q * q
    total = sum(g.double().norm().item() for g in given)
    rounding = 60 * 2.0**-23 * total
    if factor < 1:
        for step, gap in enumerate(gaps, 1):
            assert gap <= factor**step * total / 2 + rounding
    assert gaps[-1] <= 0.05 * norm
    assert gaps[-1] <= gaps[0]


def test_the_factor_says_something() -> None:
    deltas = [ck.compressor(spec).contraction("float32") for spec in BIASED]
    strong = [
        d for d in deltas if d is not None and math.sqrt(1 - d) < math.sqrt(2) - 1
    ]
    assert len(strong) >= 3


@pytest.mark.parametrize("spec", ["sign", "quantize:bits=2"])
def test_only_the_average_converges_under_plain_feedback(spec: str) -> None:
    """It is off by what is held back, divided by the number of steps."""
    given = gradients(2)
    wanted = mean(given)
    residuals = [torch.zeros(NUMEL) for _ in given]
    total, steps = torch.zeros(NUMEL, dtype=torch.float64), 200
    for step in range(steps):
        last = two_shot(spec, given, average=True, residuals=residuals, step=step)
        total += last.double()
    off = (total / steps - wanted).norm()
    assert off <= mean(residuals).norm() / steps + 1e-5 * wanted.norm()
    exact, _ = ef21(spec, given, steps)
    assert (exact[-1].double() - wanted).norm() < 1e-2 * (last - wanted).norm()
