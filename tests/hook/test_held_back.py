"""What compressed steps held back travels once nothing is compressed any more, whenever
its parameter is used again; then nothing is left of feedback."""

from __future__ import annotations

import io

import pytest
import torch
from tests.hook.models import ReverseOrder, batch, digest
from tests.hook.test_auto import Clock
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

AUTO = {"compressor": ck.Auto(rounds=3)}
# 32 bits and their exponents are more than the elements themselves.
GROWING = {"compressor": "fixed_point:bits=8", "schedule": {"bits": {0: 8, 9: 32}}}
DENSE_FROM = 9
WEIGHTS = [f"layers.{i}.weight" for i in range(4)]
# Step -> layers that no rank uses; layer 1 is used by rank 1 alone when it comes back.
UNUSED = {9: (0, 1), 10: (0, 1), 11: (0,), 12: (0,)}


class Skipping(ReverseOrder):
    def forward(self, x, skipped):
        for number, layer in reversed([*enumerate(self.layers)]):
            if number not in skipped:
                x = torch.tanh(layer(x))
        return x


def made(settings):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        Skipping(), bucket_cap_mb=0.02, find_unused_parameters=True
    )
    state = ck.register(ddp, ledger=True, **settings)
    if isinstance(settings["compressor"], ck.Auto):
        state.reducer.timeline.clock = Clock(state, (1, 50, 50))
    return ddp, state


def train(ddp, state, rank, steps, spoilt=()):
    """By step: what is held back, residuals in use, and the bits."""
    seen = []
    for step in steps:
        ddp.zero_grad()
        skipped = UNUSED.get(step, ())
        if step == 11 and rank == 0:
            skipped = (0, 1)
        loss = ddp(batch(rank, step), skipped).square().mean()
        (loss * (float("nan") if step in spoilt else 1.0)).backward()
        with torch.no_grad():
            for p in ddp.parameters():
                if p.grad is not None and torch.isfinite(p.grad).all():
                    p -= 0.1 * p.grad
        held = state.state_dict()["held_back"]
        used = state.reducer.timeline.steps[-1].buckets
        fed = [m.name for b in used for m in b.plan.members if m.residual is not None]
        seen.append((held, sorted(fed)))
    return seen


def held_back(rank, world_size, settings, spoilt):
    ddp, state = made(settings)
    seen = train(ddp, state, rank, range(16), spoilt)
    state.check_ledger()
    return seen, state.stats()["residual_norm"], digest(ddp)


@pytest.mark.parametrize("settings", [AUTO, GROWING, AUTO | {"dense_every": 10}])
def test_what_was_held_back_waits_for_its_parameter(ranks, settings):
    (seen, norm, bits), other = ranks.run(2, held_back, settings, ())
    assert (seen, norm, bits) == other
    assert seen[DENSE_FROM - 1] == (WEIGHTS, WEIGHTS)
    assert seen[9:15] == [
        (WEIGHTS[:2], WEIGHTS),
        (WEIGHTS[:2], WEIGHTS[:2]),
        (WEIGHTS[:1], WEIGHTS[:2]),
        (WEIGHTS[:1], WEIGHTS[:1]),
        ([], WEIGHTS[:1]),
        ([], []),
    ]
    assert norm == 0.0


@pytest.mark.parametrize("settings", [AUTO, GROWING])
def test_a_step_that_is_not_committed_sends_nothing(ranks, settings):
    (seen, norm, _), other = ranks.run(2, held_back, settings, (9, 13))
    assert (seen, norm) == other[:2]
    held = [held for held, _ in seen[8:]]
    first, both = WEIGHTS[:1], WEIGHTS[:2]
    assert held == [WEIGHTS, WEIGHTS, both, first, first, first, [], []]
    assert norm == 0.0


def resumed(rank, world_size, settings, stop):
    ddp, state = made(settings)
    train(ddp, state, rank, range(stop))
    file = io.BytesIO()
    torch.save({"hook": state.state_dict(), "model": ddp.module.state_dict()}, file)
    straight = train(ddp, state, rank, range(stop, 16))
    file.seek(0)
    saved = torch.load(file)
    again, restored = made(settings)
    again.module.load_state_dict(saved["model"])
    restored.load_state_dict(saved["hook"])
    went_on = train(again, restored, rank, range(stop, 16))
    with pytest.raises(TypeError, match=r"held_back.*names.*\[3\]"):
        restored.load_state_dict(saved["hook"] | {"held_back": [3]})
    return (straight, digest(ddp)), (went_on, digest(again))


@pytest.mark.parametrize("settings", [AUTO, GROWING])
@pytest.mark.parametrize("stop", [9, 11, 14])
def test_resume_is_equal_in_bits(ranks, settings, stop):
    for straight, went_on in ranks.run(2, resumed, settings, stop):
        assert straight == went_on


def begun_later(rank, world_size):
    ddp, state = made({"compressor": "sign"})
    train(ddp, state, rank, range(8))
    saved = state.state_dict()
    ddp, state = made({"compressor": "sign", "start_step": 15})
    state.load_state_dict(saved)
    seen = train(ddp, state, rank, range(8, 15))
    state.check_ledger()
    norm = state.stats()["residual_norm"]
    train(ddp, state, rank, range(15, 17))
    state.check_ledger()
    return [held for held, _ in seen], seen[-1][1], norm


def test_a_warm_up_after_a_resume_sends_what_there_is(ranks):
    for held, fed, norm in ranks.run(2, begun_later):
        assert held == [[]] * 7
        assert fed == []
        assert norm == 0.0


def loaded(rank, world_size, how):
    """Where nothing tells what was held back, everything may be."""
    ddp, state = made(GROWING)
    train(ddp, state, rank, range(11))
    saved = state.state_dict()
    if how == "rejoin":
        state.rejoin(torch.distributed.new_group([0, 1]))
    elif how == "merged":
        states = [None, None]
        torch.distributed.all_gather_object(states, saved)
        state.load_state_dict(ck.merge_state_dicts(states))
    else:
        del saved["held_back"]
        state.load_state_dict(saved)
    before = state.state_dict()["held_back"]
    seen = train(ddp, state, rank, range(11, 16))
    state.check_ledger()
    return before, seen[-1], state.stats()["residual_norm"]


@pytest.mark.parametrize(
    ("how", "before"),
    [("rejoin", WEIGHTS), ("merged", WEIGHTS[:2]), ("an older state", WEIGHTS)],
)
def test_what_may_be_held_back_travels(ranks, how, before):
    assert ranks.run(2, loaded, how) == [(before, ([], []), 0.0)] * 2
