"""Non-finite gradients, ranks that disagree or die, and what the user then sees."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import batch, digest, everything, make, train

import commkern as ck
from commkern.testing import Died


def poisoned_step(rank, world_size, spec, value, bad_step):
    """Gradients of 7 steps, rank 1 having a bad value in one; and of a run without
    that step."""
    runs = []
    for skip in (False, True):
        ddp = make()
        state = ck.register(ddp, spec, exempt=None)
        gradients, residuals = [], []
        for step in range(7):
            if skip and step == bad_step:
                state.step += 1  # noise follows the step
                continue
            ddp.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            if step == bad_step and rank == 1:
                loss = loss + value * ddp.module.layers[1].weight[3, 5]
            loss.backward()
            gradients.append([p.grad.clone() for p in ddp.parameters()])
            residuals.append(state.state_dict()["residuals"])
        runs.append((gradients, residuals))
    return runs


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_non_finite_step_is_seen_everywhere_and_leaves_no_trace(ranks, value):
    for spec in everything():
        for bad, clean in ranks.run(2, poisoned_step, spec, value, 3):
            gradients, residuals = bad
            finite = [all(torch.isfinite(g).all() for g in step) for step in gradients]
            assert finite == [True] * 3 + [False] + [True] * 3, spec
            for name, before in residuals[2].items():
                assert torch.equal(before, residuals[3][name]), (spec, name)
            for with_it, without in zip(gradients[4:], clean[0][3:], strict=True):
                for a, b in zip(with_it, without, strict=True):
                    assert torch.equal(a, b), spec


def without_rollback(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", rollback=False)
    for step in range(4):
        ddp.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if step == 1 and rank == 0:
            loss = loss * float("nan")
        loss.backward()
    residuals = state.state_dict()["residuals"].values()
    return all(torch.isfinite(r).all() for r in residuals), state.stats()


def test_without_rollback_no_residual_becomes_nan(ranks):
    for finite, stats in ranks.run(2, without_rollback):
        assert finite
        assert stats["state_nbytes"] == 4 * 4 * 64 * 64


def policies(rank, world_size, policy):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=8", nonfinite=policy, exempt=None)
    train(ddp, rank, range(2))
    ddp.zero_grad()
    loss = ddp(batch(rank, 2)).square().mean()
    weight = ddp.module.layers[0].weight
    if rank == 1:
        loss = loss + float("inf") * weight[0, 0] + float("nan") * weight[1, 1]
    error = None
    try:
        loss.backward()
    except ck.NonFiniteError as caught:
        error = str(caught)
    gradient = weight.grad.clone()
    train(ddp, rank, range(3, 5))
    return error, gradient, state.step, digest(ddp)


def test_policy_raise(ranks):
    results = ranks.run(2, policies, "raise")
    for error, _, step, _ in results:
        assert "step 2" in error
        assert step == 5
    assert results[0][3] == results[1][3]


def test_policy_saturate(ranks):
    results = ranks.run(2, policies, "saturate")
    for error, gradient, _, _ in results:
        assert error is None
        assert torch.isfinite(gradient).all()
        # Inf counts as a quarter of the largest value; averaged, half of that.
        assert gradient[0, 0] > 0.9 * torch.finfo(torch.float32).max / 8
    assert results[0][3] == results[1][3]


def dies_under_backward(rank, world_size):
    ddp = make()
    ck.register(ddp, "quantize:bits=8")
    train(ddp, rank, range(2))
    loss = ddp(batch(rank, 2)).square().mean()
    if rank == 1:
        os._exit(3)
    with pytest.raises(ck.PeerLost) as caught:
        loss.backward()
    return caught.value.rank, caught.value.step


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_dies_under_backward_is_peer_lost(ranks, world_size):
    results = ranks.run(
        world_size, dies_under_backward, group_timeout_s=15, expect_death=(1,)
    )
    assert isinstance(results[1], Died)
    for rank in set(range(world_size)) - {1}:
        assert results[rank] == (1, 2)


def disagree(rank, world_size, what):
    width = 65 if what == "shapes" and rank == 1 else 64
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(width, width), init_sync=False
    )
    bits = 4 if what == "compressor" and rank == 1 else 8
    ck.register(ddp, f"quantize:bits={bits}")
    loss = ddp(torch.ones(1, width)).sum()
    with pytest.raises(ck.MismatchError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("what", ["compressor", "shapes"])
def test_a_mismatch_under_backward(ranks, what):
    for rank, text in enumerate(ranks.run(2, disagree, what, group_timeout_s=10)):
        assert f"rank {1 - rank} differs in {what}" in text


def hook_on_one_rank_only(rank, world_size):
    ddp = make()
    if rank == 0:
        ck.register(ddp, "quantize:bits=8")
    loss = ddp(batch(rank, 0)).square().mean()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return type(caught.value).__name__


def test_a_hook_on_one_rank_only_ends_with_an_exception(ranks):
    names = ranks.run(2, hook_on_one_rank_only, group_timeout_s=6, timeout_s=40)
    assert names[0] == "PeerLost"


def rejoin(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    before = []

    def note(step: int) -> None:
        before.append(state.state_dict()["residuals"])

    train(ddp, rank, range(3), after_backward=note)
    group = dist.new_group([0, 1])
    if rank == 0:
        # As if this rank had not committed its last step.
        state.residuals.undo()
        state.step -= 1
    state.rejoin(group)
    names = before[1].keys()
    same = all(
        torch.equal(state.state_dict()["residuals"][n], before[1][n]) for n in names
    )
    return state.step, same


def test_rejoin_goes_back_to_the_lowest_committed_step(ranks):
    assert ranks.run(2, rejoin) == [(2, True), (2, True)]


def wrong_arguments(rank, world_size):
    model = torch.nn.Linear(4, 4)
    group = dist.new_group([0, 1])
    ddp = make()
    cases = {
        "fsdp": lambda: ck.register(model, "identity"),
        "group": lambda: ck.CompressionState(group, module=ddp),
        "nonfinite": lambda: ck.register(ddp, "identity", nonfinite="maybe"),
        "start": lambda: ck.register(ddp, "identity", start_step=-1),
        "rollback": lambda: ck.register(ddp, "identity", rollback="no"),
        "scaler": lambda: ck.register(ddp, "identity", grad_scaler=5),
        "exempt": lambda: ck.register(ddp, "identity", exempt=5),
        "feedback": lambda: ck.register(ddp, "identity", feedback="huh"),
        "algorithm": lambda: ck.register(ddp, "identity", algorithm="star"),
        "device": lambda: ck.CompressionState(
            None, "identity", module=torch.nn.Linear(4, 4, device="meta")
        ),
    }
    texts = {}
    for name, case in cases.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            case()
        texts[name] = str(caught.value)
    ck.register(ddp, "identity")
    with pytest.raises(RuntimeError, match="once"):
        ck.register(ddp, "identity")
    return texts


def test_wrong_arguments_are_refused_at_registration(ranks):
    texts = ranks.run(2, wrong_arguments)[0]
    assert "FSDP" in texts["fsdp"]
    assert "propagate" in texts["nonfinite"]
    assert "-1" in texts["start"]
    assert "error" in texts["feedback"]
    assert "two_shot" in texts["algorithm"]
    assert "meta" in texts["device"]


def amp(rank, world_size):
    """The loss scale halves after an overflow on one rank; residuals follow it."""
    ddp = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    state = ck.register(ddp, "quantize:bits=4", grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    norms, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        norms.append(state.stats()["residual_norm"])
        scales.append(scaler.get_scale())
    return digest(ddp), scales, norms


def test_grad_scaler(ranks):
    (first, scales, norms), (second, _, _) = ranks.run(2, amp)
    assert first == second
    assert scales == [1024.0] * 3 + [512.0] * 3
    assert norms[3] == norms[2]
    assert norms[5] < 0.8 * norms[2]
