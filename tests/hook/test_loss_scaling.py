"""autocast and GradScaler: skipped steps, the scale, and residuals that follow it."""

from __future__ import annotations

import pytest
import torch
from tests.hook.given import reduced, registered
from tests.hook.models import digest, make
from tests.laws import EVERY
from tests.simulation import same_bits, two_shot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

# Powers of two come through these unchanged, whatever the gradient.
FOLLOWS_THE_SCALE = [
    "quantize:bits=4",
    "quantize:bits=2,rounding=stochastic",
    "sign",
    "fixed_point:bits=8",
    "float8:format=e4m3,scale_dtype=e8m0",
]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(40, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 40)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def small() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Small())


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 40, generator=generator)


def scaler_of(**settings) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0} | settings)


def train(ddp, rank, steps, scaler, *, spoil=(), autocast=None) -> list[float]:
    """The scale after every step. ``spoil``: (step, rank) whose loss overflows."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scales = []
    for step in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = ddp(batch(rank, step)).float().square().mean()
        if (step, rank) in spoil:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


# --- the scale ------------------------------------------------------------------------

SPOIL = [(2, 1), (3, 0), (9, 1), (10, 0), (10, 1)]


def scales_of(rank, world_size, spec, autocast):
    found = []
    for hooked in (False, True):
        ddp, scaler = small(), scaler_of(growth_interval=3)
        if hooked:
            ck.register(ddp, spec, grad_scaler=scaler)
        scales = train(ddp, rank, range(14), scaler, spoil=SPOIL, autocast=autocast)
        found.append((scales, digest(ddp)))
    return found


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["identity", "quantize:bits=8", "sign"])
def test_the_scale_is_that_of_plain_ddp(ranks, spec, autocast):
    expected = [1024, 1024, 512, 256, 256, 256, 512, 512, 512, 256, 128, 128, 128, 256]
    (plain, first), (_, second) = ranks.run(2, scales_of, spec, autocast)
    assert plain[0] == first[0] == second[0] == expected
    assert first[1] == second[1]
    assert (first[1] == plain[1]) == (spec == "identity")


def rounds_trip(rank, world_size, spec, settings):
    """A run at scale 1, and one whose scale grows and shrinks; digests of both."""
    digests = []
    for init_scale, changes in ((1.0, {}), (256.0, settings)):
        scaler = scaler_of(init_scale=init_scale, **changes)
        ddp = small()
        state = ck.register(ddp, spec, exempt=None, seed=1, grad_scaler=scaler)
        scales = train(ddp, rank, range(8), scaler)
        saved = state.state_dict()
        residuals = {
            name: residual / saved["loss_scale"]
            for name, residual in saved["residuals"].items()
        }
        digests.append((digest(ddp), residuals, scales))
    return digests


@pytest.mark.parametrize("spec", FOLLOWS_THE_SCALE)
def test_residuals_follow_a_scale_that_grows_in_bits(ranks, spec):
    for plain, scaled in ranks.run(2, rounds_trip, spec, {"growth_interval": 2}):
        assert scaled[2] == [256, 512, 512, 1024, 1024, 2048, 2048, 4096]
        assert plain[0] == scaled[0]
        for name, residual in plain[1].items():
            assert residual.any()
            assert torch.equal(residual, scaled[1][name]), name


def without_the_spoilt_step(rank, world_size, spec):
    """A run with an overflow on rank 1, and one in which the step never happened."""
    spoilt, clean = small(), small()
    outcomes = []
    for ddp, bad in ((spoilt, [(3, 1)]), (clean, [])):
        scaler = scaler_of()
        state = ck.register(ddp, spec, exempt=None, grad_scaler=scaler)
        before = train(ddp, rank, range(3), scaler)
        kept = state.state_dict()["residuals"]
        if bad:
            before += train(ddp, rank, range(3, 4), scaler, spoil=bad)
            after = state.state_dict()["residuals"]
            assert all(torch.equal(kept[n], after[n]) for n in kept)
            assert state.stats()["committed"] is False
        else:
            state.step += 1  # noise follows the step
        before += train(ddp, rank, range(4, 7), scaler)
        assert state.stats()["committed"] is True
        outcomes.append((digest(ddp), before))
    return outcomes


@pytest.mark.parametrize("spec", FOLLOWS_THE_SCALE)
def test_a_skipped_step_leaves_no_trace_but_the_scale(ranks, spec):
    results = ranks.run(2, without_the_spoilt_step, spec)
    for (spoilt, scales), (clean, plain) in results:
        assert spoilt == clean
        assert scales == [1024.0] * 3 + [512.0] * 4
        assert plain == [1024.0] * 6
    assert results[0][0][0] == results[1][0][0]


# --- clipping -------------------------------------------------------------------------


def clipped(rank, world_size, spec):
    """Clipped between unscale_ and step, with an overflow on rank 1 in step 3: what the
    parameters are, the norms, the scales."""
    ddp, scaler = small(), scaler_of(growth_interval=2)
    if spec:
        ck.register(ddp, spec, grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    norms, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if (step, rank) == (3, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        norms.append(str(norm.item()))  # NaN equals NaN
        scales.append(scaler.get_scale())
    return digest(ddp), norms, scales


def test_clipping_of_unscaled_gradients(ranks):
    plain = ranks.run(2, clipped, None)
    identity = ranks.run(2, clipped, "identity")
    coded = ranks.run(2, clipped, "quantize:bits=8")
    assert plain[0] == plain[1] == identity[0] == identity[1]
    _, norms, scales = plain[0]
    assert scales == [1024, 2048, 2048, 1024, 1024, 2048]
    clipped_at_all = [float(norm) > 0.01 for norm in norms[:3] + norms[4:]]
    assert all(clipped_at_all)
    assert norms[3] == "nan"
    assert coded[0] == coded[1]
    assert coded[0][2] == scales
    assert coded[0][0] != plain[0][0]
    assert coded[0][1][3] == "nan"


# --- without grad_scaler= -------------------------------------------------------------


def of_a_changed_scale(rank, world_size, told):
    """Scales 1, 1, 4, 4, 4. Gradients in bits against a simulation, and how far results
    and residual are from the sum of gradients, at scale 1, after each step."""
    spec, values = "quantize:bits=4", {"w": torch.linspace(-1, 1, 1300)}
    scaler, coder = scaler_of(init_scale=1.0), ck.compressor("quantize:bits=4")
    ddp, state = registered(values, spec, **{"grad_scaler": scaler} if told else {})
    kept, total, missing = torch.zeros(1300), torch.zeros(1300).double(), []
    for step, scale in enumerate([1.0, 1.0, 4.0, 4.0, 4.0]):
        scaler.scale(torch.zeros(()))
        scaler.update(scale)
        if told and step == 2:
            kept *= 4.0
        ddp.zero_grad()
        scaler.scale(ddp(values)).backward()
        given = [values["w"] * scale]
        more = {"residuals": [kept], "name": "w", "step": step}
        wanted = two_shot(coder, given, average=True, **more)
        assert same_bits(ddp.module.w.grad, wanted), step
        total += ddp.module.w.grad.double() / scale - values["w"].double()
        missing.append(total + state.state_dict()["residuals"]["w"] / scale)
        if step == 1:
            before = kept.double()
    return missing, before


@pytest.mark.parametrize("told", [True, False])
def test_residuals_of_a_changed_scale(ranks, told):
    """Without grad_scaler= they are taken for a quarter of what they are, once."""
    ((missing, before),) = ranks.run(1, of_a_changed_scale, told)
    assert before.abs().max() > 0.05
    lost = torch.zeros_like(before) if told else -0.75 * before
    for step, found in enumerate(missing):
        expected = lost if step >= 2 else torch.zeros_like(before)
        assert (found - expected).abs().max() < 2e-6, step


# --- every compressor tells every rank ------------------------------------------------


def one_bad_value(rank, world_size):
    """What GradScaler decides when one rank has one small bad element."""
    decisions = {}
    for spec in EVERY:
        values = {"w": torch.linspace(-4, 4, 700).reshape(7, 100) * (rank + 1)}
        ddp, _ = registered(values, spec)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        for bad in (float("nan"), float("-inf")):
            scaler = scaler_of(init_scale=2.0)
            scaler.scale(torch.zeros(()))
            values["w"][3, 50] = bad if rank == 2 else 0.01
            results = reduced(ddp, values)
            before = ddp.module.w.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            skipped = torch.equal(before, ddp.module.w)
            finite = bool(results["w"].isfinite().all())
            decisions[spec, bad] = (finite, skipped, scaler.get_scale())
    return decisions


def test_all_ranks_skip_where_one_has_a_bad_value(ranks):
    for decisions in ranks.run(3, one_bad_value):
        for what, decision in decisions.items():
            assert decision == (False, True, 1.0), what


# --- settings around it ---------------------------------------------------------------


def resumed(rank, world_size, saved_at):
    """Saved under a scaler or without one; resumed in the same run, and in others under
    a scale of its own or without a scaler."""
    first, second = range(3), range(3, 6)
    ddp, state, scaler = under(saved_at)
    train(ddp, rank, first, scaler)
    saved = state.state_dict()
    model = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    train(ddp, rank, second, scaler)
    digests = [digest(ddp)]
    for scale in (None, 4.0, 4096.0):
        again, state, scaler = under(scale)
        again.module.load_state_dict(model)
        state.load_state_dict(saved)
        train(again, rank, second, scaler)
        digests.append(digest(again))
    return digests


def under(scale: float | None):
    """A model, its hook and a scaler: that starts at a scale, or is off."""
    ddp = small()
    scaler = scaler_of(init_scale=scale or 1.0, growth_interval=3, enabled=bool(scale))
    settings = {"grad_scaler": scaler} if scale else {}
    return ddp, ck.register(ddp, "quantize:bits=4", **settings), scaler


@pytest.mark.parametrize("saved_at", [None, 1024.0])
def test_a_resumed_run_may_have_another_scale_or_none(ranks, saved_at):
    for digests in ranks.run(2, resumed, saved_at):
        assert len(set(digests)) == 1


def disabled(rank, world_size):
    digests = []
    for enabled in (False, True):
        ddp = make()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        settings = {"grad_scaler": scaler} if enabled else {}
        state = ck.register(ddp, "quantize:bits=4", **settings)
        digests.append(
            (digest_after(ddp, rank, scaler), state.stats()["residual_norm"])
        )
    return digests


def digest_after(ddp, rank, scaler):
    for step in range(3):
        ddp.zero_grad()
        x = torch.linspace(-1, 1, 64).reshape(1, 64) * (rank + step + 1)
        scaler.scale(ddp(x).square().mean()).backward()
    return [p.grad.double().sum().item() for p in ddp.parameters()]


def test_a_scaler_that_is_off_changes_nothing(ranks):
    for without, with_it in ranks.run(2, disabled):
        assert without == with_it
