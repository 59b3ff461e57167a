"""Compressors by parameter and by step in the hook, and dense steps between."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import digest, make, resumed, steps_seen, train

import commkern as ck

RULES = {
    "layers.0.*": "quantize:bits=2",
    "layers.1.*": "fixed_point:bits=8",
    "layers.2.*": "identity",
    "*": "quantize:bits=8,rounding=stochastic",
}


def mixed(rank, world_size):
    ddp = make(bucket_cap_mb=25)
    state = ck.register(ddp, RULES)
    train(ddp, rank, range(3))
    plans = list(state.reducer.plans._plans.values())
    rounds = {len(plan.exchanges) for plan in plans}
    return digest(ddp), state.report(), rounds, sorted(state.state_dict()["residuals"])


def test_several_compressors_travel_in_one_message(ranks):
    (first, report, rounds, fed), (second, *_) = ranks.run(2, mixed)
    assert first == second
    weights = [report[f"layers.{i}.weight"] for i in range(4)]
    assert weights[0].startswith("quantize:bits=2")
    assert weights[1].startswith("fixed_point:bits=8")
    assert weights[2] == "identity"
    assert weights[3].startswith("quantize:bits=8")
    assert {report[f"layers.{i}.bias"] for i in range(4)} == {"identity"}
    # Two for most, two more for the second stage of fixed point; not one a section.
    assert rounds == {4}
    assert fed == [f"layers.{i}.weight" for i in (0, 1, 3)]


def seen(rank, world_size, settings, steps):
    return steps_seen(rank, settings, steps)


def check_ledger(results, tolerance=1e-5):
    """By step: sum of results so far + mean residual = sum of mean gradients."""
    world_size, left = len(results), {}
    for step in range(len(results[0])):
        for name, reduced in results[0][step]["results"].items():
            mean = sum(r[step]["given"][name] for r in results) / world_size
            assert torch.equal(reduced, results[-1][step]["results"][name])
            error = mean - reduced.double()
            left[name] = left.get(name, 0) + error
            residuals = [r[step]["residuals"].get(name) for r in results]
            held = torch.zeros(())
            if residuals[0] is not None:
                held = sum(r.double() for r in residuals).reshape(mean.shape)
            gap = (left[name] - held / world_size).norm() / mean.norm()
            assert gap < tolerance * (step + 1), (name, step, gap)


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": RULES},
        {"compressor": "sign", "dense_every": 3},
        {"compressor": RULES, "dense_every": 2, "start_step": 1},
        {"compressor": "quantize:bits=8", "schedule": {"bits": {0: 8, 2: 2, 4: 4}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ledger(ranks, world_size, settings):
    check_ledger(ranks.run(world_size, seen, settings, 6))


def test_a_dense_step_takes_along_what_was_held_back(ranks):
    settings = {"compressor": "sign", "dense_every": 3}
    results = ranks.run(2, seen, settings, 6)
    for step in range(6):
        for rank in results:
            held = [r.any().item() for r in rank[step]["residuals"].values()]
            assert held == [step not in (2, 5)] * 4, step
    for name in results[0][2]["residuals"]:
        before = sum(r[1]["residuals"][name] for r in results)
        given = sum(r[2]["given"][name] for r in results)
        exact = (given + before.reshape(given.shape)) / 2
        gap = (results[0][2]["results"][name] - exact).abs().max()
        assert before.abs().max() > 0
        assert gap <= 2e-7 * exact.abs().max()


def held_back_in_16_bits(rank, world_size):
    seen = steps_seen(
        rank, {"compressor": "sign", "dense_every": 2}, 4, dtype=torch.bfloat16
    )
    return [step["residuals"] for step in seen]


def test_a_dense_step_in_16_bits_keeps_what_it_rounds(ranks):
    for residuals in ranks.run(2, held_back_in_16_bits):
        for name in residuals[0]:
            coded, dense = (residuals[i][name].norm() for i in (2, 3))
            assert 0 < dense < 0.02 * coded


def without_feedback(rank, world_size):
    digests = []
    for settings in ({}, {"dense_every": 2, "start_step": 1}):
        ddp = make()
        ck.register(ddp, "identity", **settings)
        train(ddp, rank, range(4))
        digests.append(digest(ddp))
    return digests


def test_dense_steps_of_identity_change_no_bit(ranks):
    for one, other in ranks.run(2, without_feedback):
        assert one == other


def by_step(rank, world_size):
    ddp = make()
    schedule = {"bits": ck.Exponential(8, 2, 4)}
    state = ck.register(
        ddp, "quantize:bits=8", schedule=schedule, start_step=1, dense_every=4
    )
    reports, factors = [], []
    for step in range(5):
        reports.append(state.report()["layers.0.weight"])
        train(ddp, rank, range(step, step + 1))
        factors.append(state.stats()["compression_factor"])
    return reports, factors, str(state.compressor)


def test_schedules_and_dense_steps_in_the_hook(ranks):
    for reports, factors, given in ranks.run(2, by_step):
        bits = [text.split(",")[0].partition("bits=")[2] for text in reports]
        assert bits == ["", "6", "4", "3", ""]
        assert factors[1] < factors[2] < factors[3]
        assert factors[0] < 1.01 > factors[4]
        assert given == str(ck.Quantize(bits=8))


def refused_at_use(rank, world_size):
    ddp = make()
    schedule = {"bits": lambda step: 8 if step < 1 else 77}
    ck.register(ddp, "quantize:bits=8", schedule=schedule)
    train(ddp, rank, range(1))
    with pytest.raises(ValueError, match="bits=77 at step 1"):
        train(ddp, rank, range(1, 2))
    return True


def test_a_callable_that_is_refused_at_use_raises_in_backward(ranks):
    assert ranks.run(2, refused_at_use) == [True, True]


def disagree(rank, world_size, settings):
    ddp = make()
    ck.register(ddp, **settings[rank])
    with pytest.raises(ck.MismatchError) as caught:
        train(ddp, rank, range(1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (
            [
                {"compressor": {"*.1.*": "sign", "*": "natural"}},
                {"compressor": "natural"},
            ],
            "compressor",
        ),
        ([{"dense_every": 7}, {"dense_every": 8}], "settings"),
        ([{"schedule": {"bits": {0: 8, 9: b}}} for b in (4, 5)], "settings"),
        ([{"delayed": True}, {"delayed": False}], "settings"),
        ([{"delayed": False}, {"delayed": True}], "settings"),
        ([{"delayed": True, "seed": seed} for seed in (1, 2)], "settings"),
        ([{"delayed": d, "start_step": 3} for d in (True, False)], "settings"),
        ([{"feedback": "ef21"}, {"feedback": "error:decay=0.5"}], "settings"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_told(ranks, settings, what):
    for rank, text in enumerate(ranks.run(2, disagree, settings, group_timeout_s=10)):
        assert f"rank {1 - rank} differs in {what}" in text


@pytest.mark.parametrize("world_size", [2, 3])
def test_resume_is_equal_in_bits(ranks, world_size):
    for settings in (
        {"compressor": RULES},
        {"compressor": "sign", "dense_every": 2},
        {"compressor": "sign", "dense_every": 4},
        {"schedule": {"bits": ck.Exponential(8, 2, 6)}, "start_step": 2},
    ):
        for straight, again in ranks.run(world_size, resumed, settings):
            assert straight == again, settings


def refusals(rank, world_size):
    ddp = make()
    texts = []
    for settings in (
        {"compressor": {"layers.0.*": "sign:scale=none", "*": "sign"}},
        {"compressor": {"layers.9.*": "sign", "*": "sign"}},
        {"exempt": ck.Exempt(names=["nothing"])},
        {"schedule": {"density": 1}},
        {"dense_every": 0},
        {"feedback": "ef21", "rollback": False},
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            ck.register(ddp, **settings)
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match=r"ef21.*hook"):
        ck.ReduceState("ef21")
    with pytest.raises(TypeError, match="delayed"):
        ck.register(ddp, delayed=1)
    return texts


def test_refused_at_registration(ranks):
    texts = ranks.run(2, refusals)[0]
    needles = ["feedback", "layers.9", "nothing", "density", "dense_every", "rollback"]
    for text, needle in zip(texts, needles, strict=True):
        assert needle in text
