"""The switch ``ledger=``: sums that show whether anything was lost or counted twice."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, everything, local_gradients, make, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

MODES = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


def against_sums_by_hand(rank, world_size, spec, mode):
    ddp = make(**mode)
    state = ck.register(ddp, spec, ledger=True, seed=3)
    given, returned = {}, {}

    def note(step):
        local = local_gradients(ddp, rank, step)
        for name, p in ddp.module.named_parameters():
            given[name] = given.get(name, 0) + local[name]
            returned[name] = returned.get(name, 0) + p.grad.double()

    train(ddp, rank, range(5), after_backward=note)
    saved = state.state_dict()
    for name, by_hand in given.items():
        assert torch.equal(saved["ledger_returned"][name], returned[name].reshape(-1))
        torch.testing.assert_close(
            saved["ledger_given"][name], by_hand.reshape(-1), rtol=1e-5, atol=1e-9
        )
    return state.check_ledger(), sorted(given)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: next(iter(m), "default"))
def test_sums_are_those_by_hand_and_balance(ranks, mode):
    for spec in everything():
        first, second = ranks.run(2, against_sums_by_hand, spec, mode)
        assert first == second, spec
        assert sorted(first[0]) == first[1]
        assert max(first[0].values()) < 1e-5, spec


def eventful(rank, world_size, spec, settings):
    """Skipped steps, another loss scale, another learning rate, and a resume."""
    ddp = make()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    settings = {"grad_scaler": scaler, "ledger": True, **settings}
    rates = settings.pop("rates", None)
    if rates:
        settings["learning_rate"] = lambda: rates[state.step]
    state = ck.register(ddp, spec, **settings)
    differences, scales, committed = [], [], []
    for step in range(9):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if step in (2, 5) and rank == world_size - 1:
            loss = loss + float("nan") * ddp.module.layers[2].weight[0, 0]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 6:
            saved = state.state_dict()
            state.load_state_dict(saved, reset=False)
        differences.append(max(state.check_ledger().values()))
        scales.append(scaler.get_scale())
        committed.append(state.stats()["committed"])
    return differences, scales, committed


@pytest.mark.parametrize("spec", ["quantize:bits=4", "fixed_point:bits=8", "sign"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"rollback": False}, {"rates": [0, 0, 0.1, 0.3, 0.3, 0, 0.07, 0.05, 0.01]}],
    ids=["plain", "one version", "learning rate"],
)
def test_skips_loss_scales_and_learning_rates(ranks, spec, settings):
    for differences, scales, committed in ranks.run(2, eventful, spec, settings):
        assert max(differences) < 1e-5
        assert committed == [step not in (2, 5) for step in range(9)]
        assert len(set(scales)) >= 2


class TwoHeads(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, use_b):
        return self.a(x) + (self.b(x) if use_b else 0)


def unused_and_joined(rank, world_size):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    rates = [0.1, 0.3, 0.2, 0.4]
    state = ck.register(
        ddp, "quantize:bits=4", ledger=True, learning_rate=lambda: rates[state.step]
    )
    used = [(True, True), (False, False), (True, False), (False, True)]
    with ddp.join():
        for step in range(3 + rank):
            ddp.zero_grad()
            ddp(batch(rank, step), used[step][rank]).square().mean().backward()
    return state.check_ledger(), state.step


def test_unused_parameters_and_join(ranks):
    for differences, steps in ranks.run(2, unused_and_joined):
        assert max(differences.values()) < 1e-5
        assert steps == 4


def sixteen_bits(rank, world_size, dtype, spoil):
    ddp = make(dtype=dtype)
    state = ck.register(ddp, "quantize:bits=4", ledger=True)
    train(ddp, rank, range(8), loss_scale=1024.0, lr=1e-5)
    if spoil:
        returned = state.reducer.ledger.stores()["ledger_returned"]
        returned["layers.1.weight"].mul_(1 + spoil)
    return state.check_ledger()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_rounding_of_16_bit_results_is_excepted(ranks, dtype):
    for differences in ranks.run(3, sixteen_bits, dtype, 0.0):
        assert max(differences.values()) < 4 * torch.finfo(dtype).eps
        # Else the exception would not be tested.
        assert dtype == torch.float16 or max(differences.values()) > 1e-5
    with pytest.raises(ck.LedgerError, match=r"layers\.1\.weight"):
        ranks.run(3, sixteen_bits, dtype, 20 * torch.finfo(dtype).eps)


def lost(rank, world_size, what):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", ledger=True)
    train(ddp, rank, range(2))
    if rank == 1 and what == "residual":
        state.residuals["layers.2.weight"][7] += 0.5
    if rank == 1 and what == "nan":
        state.residuals["layers.2.weight"][7] = float("nan")
    if rank == 1 and what == "result":
        state.reducer.ledger.stores()["ledger_returned"]["layers.2.bias"][3] += 0.5
    with pytest.raises(ck.LedgerError) as caught:
        state.check_ledger()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "name", "element"),
    [("residual", "weight", 7), ("nan", "weight", 7), ("result", "bias", 3)],
)
def test_what_is_lost_is_named_on_every_rank(ranks, what, name, element):
    first, second = ranks.run(2, lost, what)
    assert first == second
    assert f"'layers.2.{name}'" in first
    assert f"in element {element}, mean gradients to" in first


def rejoined(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", ledger=True)
    train(ddp, rank, range(3))
    state.rejoin()
    begun = state.check_ledger()
    train(ddp, rank, range(3, 6))
    return begun, state.check_ledger()


def test_the_sums_start_anew_after_rejoin(ranks):
    for begun, later in ranks.run(2, rejoined):
        assert set(begun.values()) == {0.0}
        assert max(later.values()) < 1e-5


def refusals_and_memory(rank, world_size):
    ddp = make()
    texts = {}
    for key, settings in {
        "none": {"feedback": None, "ledger": True},
        "type": {"ledger": 1},
    }.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            ck.register(ddp, "quantize:bits=8", **settings)
        texts[key] = str(caught.value)
    state = ck.register(ddp, "quantize:bits=8")
    with pytest.raises(ValueError, match="ledger=False"):
        state.check_ledger()
    other = ck.register(make(), "quantize:bits=8", ledger=True)
    return texts, state.stats()["state_nbytes"], other.stats()["state_nbytes"]


def test_refusals_and_memory(ranks):
    texts, plain, with_ledger = ranks.run(2, refusals_and_memory)[0]
    assert "must be \"error\", got 'None'" in texts["none"]
    assert "got 1" in texts["type"]
    numbers = 4 * 64 * 64 + 4 * 64
    # Sums start at multiples of 16 numbers; 8 parameters have a bound each.
    assert with_ledger - plain == 8 * (2 * numbers + 7 * 16 + 1)
