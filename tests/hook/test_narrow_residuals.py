"""Residuals in bf16: what is lost is their rounding, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, make, resumed, steps_seen, train

import commkern as ck

NARROW = {"residual_dtype": "bf16"}


def seen(rank, world_size, settings):
    return steps_seen(rank, settings, 5)


SETTINGS = [
    {"compressor": "quantize:bits=4"},
    {"compressor": "quantize:bits=4", "rollback": False},
    {"compressor": "sign", "dense_every": 3},
    {"compressor": "sign", "feedback": "error:decay=0.5"},
]


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_a_step_loses_no_more_than_the_rounding(ranks, settings):
    """Of each element: results + residuals = gradients + residuals before, to half of
    the last of the 8 bits of what is kept."""
    results = ranks.run(2, seen, settings | NARROW)
    lost = 0.0
    for name in results[0][0]["residuals"]:
        before = torch.zeros(())
        for step in range(5):
            here = [rank[step] for rank in results]
            kept = [each["residuals"][name].double() for each in here]
            result = here[0]["results"][name].double().flatten()
            given = sum(each["given"][name] for each in here).flatten() / 2
            after = sum(kept) / 2
            gap = (given + before - result - after).abs()
            bound = sum(each.abs() for each in kept) / 2 * 2**-8
            assert (gap <= bound + 1e-6 * given.abs().max()).all(), (name, step)
            lost = max(lost, (gap / (bound + 1e-30)).median().item())
            before = after
    assert lost > 0.1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_first_residuals_are_those_of_fp32_rounded(ranks, settings):
    both = zip(
        ranks.run(2, seen, settings), ranks.run(2, seen, settings | NARROW), strict=True
    )
    for wide, narrow in both:
        for name, residual in narrow[0]["residuals"].items():
            assert residual.dtype == torch.bfloat16
            assert torch.equal(residual, wide[0]["residuals"][name].bfloat16())
            assert torch.equal(narrow[0]["results"][name], wide[0]["results"][name])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resume_is_equal_in_bits(ranks, settings):
    for straight, again in ranks.run(2, resumed, settings | NARROW):
        assert straight == again


def spoilt(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", **NARROW)
    train(ddp, rank, range(3))
    before = state.state_dict()["residuals"]
    loss = ddp(batch(rank, 3)).square().mean()
    (loss * (float("nan") if rank else 1.0)).backward()
    after = state.state_dict()["residuals"]
    mean = state.full_state_dict()["residuals"]
    ddp.zero_grad()
    train(ddp, rank, range(4, 6))
    finite = all(p.isfinite().all() for p in ddp.parameters())
    return before, after, mean, finite


def test_a_step_that_is_not_finite_leaves_residuals_as_they_were(ranks):
    results = ranks.run(2, spoilt)
    for before, after, mean, finite in results:
        assert finite
        assert before.keys() == after.keys()
        for name, residual in before.items():
            assert torch.equal(residual, after[name])
            both = sum(r[0][name].float() for r in results) / 2
            assert torch.equal(mean[name], both.bfloat16())


def refused(rank, world_size):
    texts = []
    for settings in ({"ledger": True}, {"feedback": "ef21"}):
        with pytest.raises(ValueError, match="needs residual_dtype='fp32'") as caught:
            ck.register(make(), **NARROW, **settings)
        texts.append(str(caught.value))
    wide, narrow = ck.register(make()), ck.register(make(), **NARROW)
    with pytest.raises(ValueError, match="dtype of residuals") as caught:
        narrow.load_state_dict(wide.state_dict())
    return [*texts, str(caught.value)]


def test_what_needs_exact_residuals_is_refused(ranks):
    for ledger, ef21, loaded in ranks.run(2, refused):
        assert "ledger=True" in ledger
        assert "'ef21'" in ef21
        assert "torch.bfloat16" in loaded
        assert "torch.float32" in loaded
