"""A debug mode: who writes into gradients while the hook reduces them is told."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.hook.given import Given
from tests.hook.models import batch, digest, make, train
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

VIEWS = [False, True]
MODES = [{}, {"delayed": True, "start_step": 1}, {"feedback": None}]


def watched(rank, world_size, view, settings):
    digests = []
    for check in (False, True):
        ddp = make(gradient_as_bucket_view=view)
        state = ck.register(ddp, "quantize:bits=4", check_inputs=check, **settings)
        train(ddp, rank, range(4))
        state.wait()
        digests.append(digest(ddp))
    return digests


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_watching_changes_no_bit(ranks, view, settings):
    for before, after in ranks.run(2, watched, view, settings):
        assert before == after


def double(p):
    p.grad.mul_(2)


def edited_in_time(rank, world_size, view):
    """What is left after a pass, in which each parameter's own hook edits it or not."""
    left = []
    for spec, edits in ((None, True), ("identity", True), ("identity", False)):
        ddp = make(gradient_as_bucket_view=view)
        if spec:
            ck.register(ddp, spec, check_inputs=True)
        for p in ddp.parameters() if edits else ():
            p.register_post_accumulate_grad_hook(double)
        passes = []
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            passes.append([p.grad.clone() for p in ddp.parameters()])
        left.append(passes)
    return left


@pytest.mark.parametrize("view", VIEWS)
def test_what_a_post_accumulate_grad_hook_does_is_in_time(ranks, view):
    for plain, hooked, without in ranks.run(2, edited_in_time, view):
        for step in range(3):
            rows = zip(plain[step], hooked[step], without[step], strict=True)
            for one, other, half in rows:
                assert torch.equal(one, other)
                assert torch.equal(other, 2 * half)


def watched_complex(rank, world_size):
    values = {"w": torch.full((40, 40), 1 + 2j) * (rank + 1), "b": torch.ones(3) * 1j}
    ddp = DistributedDataParallel(Given(values))
    ck.register(ddp, "quantize:bits=8", check_inputs=True)
    ddp(values).backward()
    return ddp.module.w.grad[0, 0].item(), ddp.module.b.grad[0].item()


def test_complex_gradients_are_watched(ranks):
    for weight, bias in ranks.run(2, watched_complex):
        assert abs(weight - (1.5 + 3j)) < 0.02
        assert bias == 1j


def spoilt(rank, world_size, view, late):
    """Rank 1 writes into a gradient that the hook has: before the worker begins with
    it (``late`` is False), or when its result is about to be handed over."""
    values = {name: torch.ones(40, 40) for name in ("first", "second")}
    ddp = DistributedDataParallel(Given(values), gradient_as_bucket_view=view)
    state = ck.register(ddp, check_inputs=True)
    ddp(values).backward()  # from now on p.grad is a view of the bucket, if wanted
    worker, reach = state.reducer.worker, threading.Event()
    target = ddp.module.second

    def write():
        target.grad[3, 3] = 7.0

    run = worker.run
    if rank == 1 and late:

        def run_and_write(*args, **kwargs):
            outcome = run(*args, **kwargs)
            write()
            return outcome

        worker.run = run_and_write
    elif rank == 1:
        worker.submit(reach.wait)  # the bucket's job waits behind it

        def hook(parameter):
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: (write(), reach.set()))

        ddp.module.first.register_post_accumulate_grad_hook(hook)
    caught = []
    for _ in range(2):
        loss = ddp(values)
        try:
            loss.backward()
        except ck.CommkernError as error:
            caught.append((type(error).__name__, str(error)))
    return caught, state.step


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_gradient_that_is_written_to_is_named(ranks, view, late):
    (told, _), (caught, step) = ranks.run(2, spoilt, view, late, group_timeout_s=10)
    assert caught[0][0] == "CommkernError"
    assert "second" in caught[0][1]
    assert "first" not in caught[0][1]
    assert caught == [caught[0]] * 2
    assert step == 1
    # The other rank has its result by then, and is told with the next step.
    assert [kind for kind, _ in told] == ["PeerFailed"]
    assert "rank 1" in told[0][1]


def test_only_a_switch_is_taken():
    with pytest.raises(TypeError, match="check_inputs must be True or False, got 1"):
        ck.CompressionState(module=torch.nn.Linear(2, 2), check_inputs=1)
