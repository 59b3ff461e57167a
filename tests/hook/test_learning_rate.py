"""Residuals follow the learning rate, so that the updates they stand for keep their
size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import batch, make

import commkern as ck


def gradients(ddp, rank, step):
    ddp.zero_grad()
    ddp(batch(rank, step)).square().mean().backward()
    return [p.grad.clone() for p in ddp.parameters()]


def by_hand(rank, world_size, rates, factors, rollback):
    """Results with a learning rate, and with residuals multiplied by hand."""
    settings = {"rollback": rollback, "seed": 1}
    spec = "quantize:bits=4,rounding=stochastic"
    ddp, other = make(), make()
    at = []
    state = ck.register(ddp, spec, learning_rate=lambda: at[-1], **settings)
    plain = ck.register(other, spec, **settings)
    equal = []
    for step, (rate, factor) in enumerate(zip(rates, factors, strict=True)):
        at.append(rate)
        plain.residuals.scale(factor)
        pairs = zip(
            gradients(ddp, rank, step), gradients(other, rank, step), strict=True
        )
        equal.append(all(torch.equal(a, b) for a, b in pairs))
    return equal, state.state_dict()["learning_rate"]


@pytest.mark.parametrize("rollback", [True, False])
def test_residuals_are_multiplied_by_old_over_new(ranks, rollback):
    rates = [0.25, 0.25, 0.125, 0.5, torch.tensor(1.0)]
    factors = [1.0, 1.0, 2.0, 0.25, 0.5]
    for equal, rate in ranks.run(2, by_hand, rates, factors, rollback):
        assert equal == [True] * 5
        assert rate == 1.0
    # The factor matters: without it the results are others.
    for equal, _ in ranks.run(2, by_hand, rates, [1.0] * 5, rollback):
        assert equal == [True, True, False, False, False]


def test_zero_leaves_residuals_as_they_are(ranks):
    rates = [0, 0.0, 0.25, 0.5, 0, 0.125]
    factors = [1, 1, 1, 0.5, 1, 1]
    for equal, rate in ranks.run(2, by_hand, rates, factors, True):
        assert equal == [True] * 6
        assert rate == 0.125


def resumed(rank, world_size):
    ddp, rate = make(), [0.5]
    state = ck.register(ddp, "quantize:bits=4", learning_rate=lambda: rate[0])
    gradients(ddp, rank, 0)
    saved = state.state_dict()
    rate[0] = 0.125
    straight = gradients(ddp, rank, 1)
    again = make()
    other = ck.register(again, "quantize:bits=4", learning_rate=lambda: 0.125)
    other.load_state_dict(saved)
    pairs = zip(straight, gradients(again, rank, 1), strict=True)
    return saved["learning_rate"], all(torch.equal(a, b) for a, b in pairs)


def test_the_rate_is_saved(ranks):
    assert ranks.run(2, resumed) == [(0.5, True)] * 2


def calls_and_refusals(rank, world_size):
    texts, called = [], []
    for bad in (-0.1, float("nan"), float("inf")):
        group = dist.new_group([0, 1])  # spent by what is refused
        ddp, rates = make(process_group=group), iter([0.5, 0.5, 0.5, bad])
        state = ck.register(ddp, "quantize:bits=4", learning_rate=rates.__next__)
        for step in range(3):  # one bucket, then several
            gradients(ddp, rank, step)
        with pytest.raises(ValueError, match="learning_rate") as caught:
            gradients(ddp, rank, 3)
        texts.append(str(caught.value))
        called.append((state.step, len(list(rates))))
    with pytest.raises(TypeError, match=r"callable.*got 0\.1"):
        ck.register(make(), "identity", learning_rate=0.1)
    return called, texts


def test_one_call_a_step_and_no_negative_rate(ranks):
    for called, texts in ranks.run(2, calls_and_refusals):
        assert called == [(3, 0)] * 3
        for text, got in zip(texts, ("-0.1", "nan", "inf"), strict=True):
            assert f"got {got} after 0.5" in text
