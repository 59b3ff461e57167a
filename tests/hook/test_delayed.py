"""Results handed out one step later."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import batch, digest, make, resumed, train
from tests.hook.test_feedback_variants import Scaler

import commkern as ck
from commkern.testing import Died

CODER = "quantize:bits=4,rounding=stochastic"


def both(rank, world_size, settings, steps=6):
    """A delayed run, and an undelayed one that is led along the same parameters."""
    ddp, led = make(), make()
    delayed = ck.register(ddp, CODER, delayed=True, **settings)
    ck.register(led, CODER, **settings)
    results = ([], [])
    for step in range(steps):
        led.module.load_state_dict(ddp.module.state_dict())
        for model, got in ((ddp, results[0]), (led, results[1])):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            got.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad
    return results, delayed.step


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("feedback", ["error", "ef21"])
def test_results_are_those_of_the_step_before(ranks, feedback, first):
    """In bits, over rebuilt buckets and dense steps; before start_step at once."""
    settings = {"feedback": feedback, "start_step": first, "dense_every": 3}
    for (delayed, undelayed), step in ranks.run(2, both, settings):
        assert step == 6
        for at in range(6):
            want = undelayed[at] if at < first else undelayed[at - 1]
            for got, one in zip(delayed[at], want, strict=True):
                expected = torch.zeros_like(one) if at == first else one
                assert torch.equal(got, expected), at
        assert any(g.any() for g in delayed[first + 1])


def ahead(rank, world_size):
    """Rank 1 starts its backward when rank 0 has ended its own."""
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True)
    train(ddp, rank, range(3))
    loss = ddp(batch(rank, 3)).square().mean()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has its gradients"])
    loss.backward()
    if rank == 0:
        reduced = state.reducer.step
        store.set("rank 0 has its gradients", "")
    else:
        reduced = None
    state.wait()
    return reduced, state.step, [p.grad.clone() for p in ddp.parameters()]


def test_backward_waits_for_no_peer(ranks):
    (reduced, step0, first), (_, step1, second) = ranks.run(2, ahead, timeout_s=60)
    assert reduced == 3, "the step is not reduced when its backward has ended"
    assert step0 == step1 == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class EndsWhenAsked:
    """A job that ends, and commits its step, just when somebody asks whether it has."""

    def __init__(self, job, reducer):
        self._job, self._reducer = job, reducer
        reducer.step -= 1

    def __getattr__(self, name):
        return getattr(self._job, name)

    def done(self):
        self._reducer.step += 1
        return True


def ends_meanwhile(rank, world_size):
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True)
    train(ddp, rank, range(3))
    state.wait()
    newest = state.reducer.delay._newest
    newest.done = EndsWhenAsked(newest.done, state.reducer)
    train(ddp, rank, range(3, 4))
    return state.step


def test_a_step_that_ends_while_the_next_one_begins_is_counted(ranks):
    assert ranks.run(1, ends_meanwhile) == [4]


@pytest.mark.parametrize("world_size", [2, 3])
def test_resume_is_equal_in_bits(ranks, world_size):
    for settings in (
        {"compressor": CODER},
        {"compressor": CODER, "feedback": "ef21", "dense_every": 2},
        {"compressor": "sign", "start_step": 3},
    ):
        settings = settings | {"delayed": True}
        for straight, again in ranks.run(world_size, resumed, settings):
            assert straight == again, settings


def saved(rank, world_size):
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True)
    train(ddp, rank, range(2))
    plain = ck.CompressionState(None, CODER, module=ddp.module)
    kept = state.state_dict()
    with pytest.raises(ValueError, match=r"delayed.*False.*True"):
        plain.load_state_dict(kept)
    with pytest.raises(ValueError, match=r"delayed.*True.*False"):
        state.load_state_dict(plain.state_dict())
    wrong = kept["pending"] | {"layers.0.bias": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"layers\.0\.bias.*64.*3"):
        state.load_state_dict(kept | {"pending": wrong})
    return kept["step"], {n: p.shape for n, p in kept["pending"].items()}


def test_state_dict_waits_and_holds_what_is_pending(ranks):
    for step, pending in ranks.run(2, saved):
        assert step == 2
        assert len(pending) == 8
        assert pending["layers.3.weight"] == (64 * 64,)


def saved_on_its_way(rank, world_size):
    ddp, scaler = make(), Scaler()
    state = ck.register(ddp, CODER, delayed=True, grad_scaler=scaler)
    train(ddp, rank, range(2))
    state.wait()
    begins = threading.Event()
    state.reducer.worker.submit(begins.wait)
    scaler.scale *= 8
    train(ddp, rank, range(2, 3))
    threading.Timer(0.5, begins.set).start()
    saved = state.state_dict()
    return saved["step"], saved["loss_scale"] / scaler.scale


def test_a_saved_step_goes_with_its_loss_scale(ranks):
    assert ranks.run(2, saved_on_its_way) == [(3, 1.0)] * 2


def spoilt(rank, world_size, policy):
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True, nonfinite=policy)
    finite, errors, stores = [], [], []
    for step in range(5):
        ddp.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if step == 2 and rank == 1:
            loss = loss + float("nan") * ddp.module.layers[1].weight[3, 5]
        try:
            loss.backward()
        except ck.NonFiniteError as error:
            errors.append((step, str(error)))
        grads = [p.grad for p in ddp.parameters()]
        finite.append(all(torch.isfinite(grad).all().item() for grad in grads))
        stores.append(state.state_dict()["residuals"])
    same = [
        all(torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(stores)
    ]
    return finite, errors, same


@pytest.mark.parametrize("policy", ["propagate", "raise"])
def test_a_non_finite_step_is_told_one_step_later(ranks, policy):
    for finite, errors, same in ranks.run(2, spoilt, policy):
        assert finite == [True, True, True, False, True]
        assert same == [False, True, False, False]
        assert [step for step, _ in errors] == ([3] if policy == "raise" else [])
        assert all("step 2" in text for _, text in errors)


def resumed_behind_a_spoilt_step(rank, world_size):
    ddp, again = make(), make()
    state = ck.register(ddp, CODER, delayed=True, nonfinite="raise")
    resumed = ck.register(again, CODER, delayed=True, nonfinite="raise")
    train(ddp, rank, range(2))
    (ddp(batch(rank, 2)).sum() * float("nan")).backward()
    resumed.load_state_dict(state.state_dict())
    with pytest.raises(ck.NonFiniteError, match="step 2"):
        again(batch(rank, 3)).square().mean().backward()
    train(again, rank, range(4, 6))
    return resumed.step


def test_a_load_tells_of_a_spoilt_step_that_is_pending(ranks):
    assert ranks.run(2, resumed_behind_a_spoilt_step) == [6, 6]


def scaled(rank, world_size):
    results = []
    for scales in ([1.0] * 4, [8.0, 2.0, 2.0, 64.0]):
        ddp, scaler = make(), Scaler()
        ck.register(ddp, CODER, delayed=True, grad_scaler=scaler)
        got = []
        for step, scaler.scale in enumerate(scales):
            ddp.zero_grad()
            (ddp(batch(rank, step)).square().mean() * scaler.scale).backward()
            got.append([p.grad / scaler.scale for p in ddp.parameters()])
        results.append(got)
    return results


def test_pending_results_follow_the_loss_scale(ranks):
    for plain, other in ranks.run(2, scaled):
        for one, two in zip(plain, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def first_steps(rank, world_size, how):
    """Is the first step behind where its backward ends, and what is told of it?"""
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True, nonfinite="raise")
    train(ddp, rank, range(3))
    if how == "rejoin":
        state.rejoin(dist.new_group([0, 1]))
    elif how == "load":
        state.load_state_dict(state.state_dict())
    errors = []
    for step in (3, 4):
        ddp.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        try:
            (loss * (float("nan") if step == 3 else 1.0)).backward()
        except ck.NonFiniteError:
            errors.append(step)
        if step == 3:
            behind = state.reducer.step
    state.wait()
    return behind, errors


@pytest.mark.parametrize("how", ["load", "rejoin"])
def test_the_first_step_together_is_waited_for(ranks, how):
    assert ranks.run(2, first_steps, how) == [(4, [4])] * 2


def dies(rank, world_size):
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True)
    train(ddp, rank, range(3))
    loss = ddp(batch(rank, 3)).square().mean()
    state.wait()
    dist.barrier()
    if rank == 1:
        os._exit(3)
    loss.backward()
    with pytest.raises(ck.PeerLost) as caught:
        ddp(batch(rank, 4)).square().mean().backward()
    return caught.value.rank, caught.value.step


def test_a_lost_peer_is_told_one_step_later(ranks):
    results = ranks.run(2, dies, group_timeout_s=15, expect_death=(1,))
    assert isinstance(results[1], Died)
    assert results[0] == (1, 3)


def rejoined(rank, world_size):
    ddp = make()
    state = ck.register(ddp, CODER, delayed=True)
    train(ddp, rank, range(3))
    state.rejoin(dist.new_group([0, 1]))
    ddp.zero_grad()
    ddp(batch(rank, 3)).square().mean().backward()
    zeros = not any(p.grad.any() for p in ddp.parameters())
    train(ddp, rank, range(4, 6))
    return zeros, state.step, digest(ddp)


def test_rejoin_drops_what_was_pending(ranks):
    first, second = ranks.run(2, rejoined)
    assert first == second
    assert first[:2] == (True, 6)
