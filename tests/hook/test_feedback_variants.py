"""Decayed error feedback and EF21 in the hook."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, digest, make, resumed, steps_seen, train

import commkern as ck

CODERS = [
    "quantize:bits=4,rounding=stochastic",
    "sign",
    "fixed_point:bits=8",
    "cast",
    "nvfp4",
]


def several(rank, world_size, settings, steps, ddp=None):
    ddp = ddp or {}
    return [steps_seen(rank, one, steps, **ddp) for one in settings]


def each(results, index):
    """By rank: the steps of one of the settings."""
    return [rank[index] for rank in results]


@pytest.mark.parametrize("mode", [{}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ef21_is_the_mean_of_all_estimates(ranks, world_size, mode):
    """w = -mean of residuals to rounding, and results are w to the bit."""
    settings = [{"compressor": coder, "feedback": "ef21"} for coder in CODERS]
    settings.append(settings[1] | {"dense_every": 2})
    results = ranks.run(world_size, several, settings, 5, mode)
    for index, setting in enumerate(settings):
        by_rank = each(results, index)
        for step in range(5):
            for name, w in by_rank[0][step]["estimates"].items():
                for rank in by_rank:
                    assert torch.equal(rank[step]["estimates"][name], w)
                    assert torch.equal(rank[step]["results"][name].reshape(-1), w)
                mean = sum(r[step]["residuals"][name].double() for r in by_rank)
                gap = (w + mean / world_size).abs().max()
                assert gap <= 4e-7 * (step + 1) * w.abs().max(), (setting, step, name)


def test_ef21_on_a_dense_step_is_the_mean_gradient(ranks):
    settings = {"compressor": "sign", "feedback": "ef21", "dense_every": 3}
    warm = settings | {"start_step": 2, "dense_every": None}
    results = ranks.run(2, several, [settings, warm], 4)
    for index, dense in ((0, {2}), (1, {0, 1})):
        by_rank = each(results, index)
        for step in range(4):
            gap = scale = 0.0
            for name in by_rank[0][0]["residuals"]:
                mean = sum(r[step]["given"][name] for r in by_rank) / 2
                gap += (by_rank[0][step]["results"][name] - mean).norm().item()
                scale += mean.norm().item()
            assert (gap < 1e-6 * scale) == (step in dense), (index, step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ef21_loses_nothing_to_16_bit_results(ranks, dtype):
    """Its sums are fp32, and so is what is added to them."""
    settings = [{"compressor": "quantize:bits=4", "feedback": "ef21"}]
    results = each(ranks.run(2, several, settings, 6, {"dtype": dtype}), 0)
    for name, w in results[0][5]["estimates"].items():
        mean = sum(r[5]["residuals"][name].double() for r in results) / 2
        assert (w + mean).abs().max() <= 2e-6 * w.abs().max()
        assert not torch.equal(w, w.to(dtype).float())
        assert torch.equal(results[0][5]["results"][name].reshape(-1), w.to(dtype))


@pytest.mark.parametrize("coder", CODERS)
def test_decay_keeps_a_part_of_the_error(ranks, coder):
    """Sum of residuals = decay x (sum of gradients and of old ones - n x result)."""
    settings = [{"compressor": coder, "feedback": "error:decay=0.75"}]
    results = each(ranks.run(2, several, settings, 4), 0)
    for name in results[0][0]["residuals"]:
        held = torch.zeros(64, 64, dtype=torch.float64)
        for step in range(4):
            given = sum(r[step]["given"][name] for r in results)
            left = sum(r[step]["residuals"][name].double() for r in results)
            lost = given + held - 2 * results[0][step]["results"][name].double()
            held = left.reshape(64, 64)
            assert (held - 0.75 * lost).norm() < 1e-6 * given.norm()
            assert held.norm() > 0


def same_bits(rank, world_size):
    digests = []
    for feedback in ("error", ck.ErrorFeedback(decay=1), "error:decay=0.999", "ef21"):
        ddp = make()
        ck.register(ddp, "quantize:bits=4", feedback=feedback)
        train(ddp, rank, range(4))
        digests.append(digest(ddp))
    return digests


def test_decay_1_is_plain_in_bits(ranks):
    for plain, one, less, ef21 in ranks.run(2, same_bits):
        assert plain == one
        assert len({plain, less, ef21}) == 3


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("feedback", ["error:decay=0.9", "ef21"])
def test_resume_is_equal_in_bits(ranks, feedback, world_size):
    for coder in CODERS[:3]:
        settings = {"compressor": coder, "feedback": feedback}
        for straight, again in ranks.run(world_size, resumed, settings):
            assert straight == again


def spoilt(rank, world_size, feedback):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", feedback=feedback)
    saved, clean = [], []
    for skip in (False, True):
        ddp = make()
        state = ck.register(ddp, "quantize:bits=4", feedback=feedback)
        for step in range(4):
            if skip and step == 2:
                state.step += 1
                continue
            ddp.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            if step == 2 and rank == 1:
                loss = loss + float("inf") * ddp.module.layers[1].weight[3, 5]
            loss.backward()
            kept = {k: v for k, v in state.state_dict().items() if isinstance(v, dict)}
            (clean if skip else saved).append(kept)
    return saved, clean


@pytest.mark.parametrize("feedback", ["error:decay=0.9", "ef21"])
def test_a_non_finite_step_leaves_no_trace(ranks, feedback):
    for saved, clean in ranks.run(2, spoilt, feedback):
        assert ("estimates" in saved[0]) == (feedback == "ef21")
        for key, before in saved[1].items():
            for name in before:
                assert torch.equal(before[name], saved[2][key][name])
                assert torch.equal(saved[3][key][name], clean[2][key][name])


def unused(rank, world_size):
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(
        TwoHeads(), find_unused_parameters=True
    )
    state = ck.register(ddp, "quantize:bits=4", exempt=None, feedback="ef21")
    seen = []
    for step, use_b in enumerate([(0, 1), (), (0,), (0, 1)]):
        ddp.zero_grad()
        ddp(batch(rank, step, 40), rank in use_b).square().mean().backward()
        saved = state.state_dict()
        gradient = ddp.module.b.weight.grad
        seen.append(
            (
                saved["estimates"]["b.weight"],
                saved["residuals"]["b.weight"],
                None if gradient is None else gradient.reshape(-1).clone(),
            )
        )
    return seen


def test_ef21_leaves_unused_parameters_alone(ranks):
    first, second = ranks.run(2, unused)
    for step in range(4):
        (w, r0, gradient), (_, r1, _) = first[step], second[step]
        assert (w + (r0 + r1) / 2).abs().max() <= 1e-6 * w.abs().max()
        assert (gradient is None) == (step == 1)
        assert gradient is None or torch.equal(gradient, w)
    for before, after in zip(first[0][:2], first[1][:2], strict=True):
        assert torch.equal(before, after)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(40, 40)
        self.b = torch.nn.Linear(40, 40)

    def forward(self, x, use_b):
        return self.a(x) + (self.b(x) if use_b else 0)


class Scaler:
    def __init__(self):
        self.scale = 8.0

    def get_scale(self):
        return self.scale


def scaled(rank, world_size, feedback):
    """The same training, without and with a loss scale that changes."""
    results = []
    for scales in ([1.0] * 4, [8.0, 8.0, 2.0, 64.0]):
        ddp, scaler = make(), Scaler()
        state = ck.register(
            ddp, "quantize:bits=4", feedback=feedback, grad_scaler=scaler
        )
        got = []
        for step, scaler.scale in enumerate(scales):
            ddp.zero_grad()
            (ddp(batch(rank, step)).square().mean() * scaler.scale).backward()
            got.append([p.grad / scaler.scale for p in ddp.parameters()])
        stores = (state.residuals, state.reducer.stores.estimates)
        results.append((got, [s["layers.0.weight"] for s in stores if s is not None]))
    return results


@pytest.mark.parametrize("feedback", ["error:decay=0.5", "ef21"])
def test_state_follows_the_loss_scale_in_bits(ranks, feedback):
    for (plain, stores), (scaled_, scaled_stores) in ranks.run(2, scaled, feedback):
        for one, other in zip(plain, scaled_, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(stores, scaled_stores, strict=True):
            assert torch.equal(one * 64, other)


def resized(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", feedback="ef21")
    train(ddp, rank, range(3))
    full = state.full_state_dict()
    w = state.state_dict()["estimates"]["layers.0.weight"]
    alone = ck.CompressionState(
        None, "quantize:bits=4", feedback="ef21", module=ddp.module
    )
    alone.load_state_dict(full)
    return w, full["estimates"]["layers.0.weight"], alone.residuals["layers.0.weight"]


def test_full_state_dict_keeps_the_estimate(ranks):
    for w, full, residual in ranks.run(2, resized):
        assert torch.equal(full, w)
        assert (residual + w).abs().max() <= 1e-6 * w.abs().max()
