"""What the hook's features do to each other, in places where one meets another."""

from __future__ import annotations

import copy
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.hook.given import reduced, registered
from tests.hook.models import batch, digest, make, train
from tests.hook.test_auto import FULL, Clock
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

FOUR = "quantize:bits=4"


def hooked(compressor=FOUR, mode=(), **settings):
    ddp = make(**dict(mode))
    return ddp, ck.register(ddp, compressor, **settings)


def slow_down(state, seconds):
    """Every bucket takes that much longer."""
    run = state.reducer.worker.run

    def slow(*args, **rest):
        time.sleep(seconds)
        return run(*args, **rest)

    state.reducer.worker.run = slow


def made_anew(model, state):
    """The model in a new DDP module, reduced by the same state; the old one is gone."""
    gc.collect()
    again = DistributedDataParallel(model, bucket_cap_mb=0.02)
    again.register_comm_hook(state, ck.compression_hook)
    return again


def one_less(rank, world_size, path):
    torch.manual_seed(rank)
    mine = {"w": torch.randn(40, 40) + rank}
    ddp, state = registered(mine, FOUR, feedback="ef21")
    for _ in range(8):
        reduced(ddp, mine)
    dist.barrier()
    if rank == 2:
        os._exit(3)
    with pytest.raises(ck.PeerLost):
        reduced(ddp, mine)
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    state.rejoin()
    model = ddp.module
    del ddp
    again = made_anew(model, state)
    for _ in range(12):
        got = reduced(again, mine)["w"]
    return mine["w"], got


def test_ef21_forgets_a_rank_that_is_gone(ranks, tmp_path):
    limits = {"group_timeout_s": 15, "expect_death": (2,)}
    results = ranks.run(3, one_less, str(tmp_path / "store"), **limits)
    wanted = (results[0][0] + results[1][0]) / 2
    for _, got in results[:2]:
        assert (got - wanted).abs().max() < 1e-5


def saved_with_dcp(rank, world_size, path, first):
    settings = {"delayed": True, "start_step": first, "feedback": "ef21"}
    ddp, state = hooked(**settings)
    train(ddp, rank, range(3))
    parts = {"hook": state.per_rank(), "model": ddp.module.state_dict()}
    dcp.save(parts, checkpoint_id=path)
    train(ddp, rank, range(3, 6))

    again, restored = hooked(mode={"seed": 99}, **settings)
    model = again.module.state_dict()
    dcp.load({"hook": restored.per_rank(), "model": model}, checkpoint_id=path)
    again.module.load_state_dict(model)
    train(again, rank, range(3, 6))
    return state.step, digest(ddp), restored.step, digest(again)


@pytest.mark.parametrize("first", [0, 4])
def test_what_is_due_comes_back_from_a_distributed_checkpoint(ranks, tmp_path, first):
    for *straight, step, again in ranks.run(2, saved_with_dcp, str(tmp_path), first):
        assert straight == [step, again]


def advised_in_flight(rank, world_size):
    ddp, state = hooked(delayed=True)
    train(ddp, rank, range(3))
    state.wait()
    slow_down(state, 0.2 * rank)
    train(ddp, rank, range(3, 4))
    return str(state.advise().verdict)


def test_advice_waits_for_the_step_on_its_way(ranks):
    first, second = ranks.run(2, advised_in_flight, timeout_s=30)
    assert first == second


def abandoned_in_flight(rank, world_size):
    ddp, state = hooked(delayed=True, ledger=True)
    train(ddp, rank, range(3))
    slow_down(state, 0.2)
    train(ddp, rank, range(3, 4))
    handle = ddp.module.layers[3].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(ddp, rank, range(4, 5))
    handle.remove()
    asked = state.step if rank == 1 else 4
    model = ddp.module
    del ddp
    again = made_anew(model, state)
    train(again, rank, range(4, 6))
    state.check_ledger()
    return asked, state.step, digest(again)


def test_a_step_is_abandoned_while_another_is_on_its_way(ranks):
    first, second = ranks.run(2, abandoned_in_flight)
    assert first == second
    assert first[:2] == (4, 6)


class Raises(torch.autograd.Function):
    """In backward, behind the last gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def abandoned_at_the_end(rank, world_size):
    """The step is reduced all the same, when the next one has begun at the latest."""
    ddp, state = hooked(ledger=True)
    train(ddp, rank, range(3))
    slow_down(state, 0.5)
    with pytest.raises(ZeroDivisionError):
        ddp(Raises.apply(batch(rank, 3).requires_grad_())).square().mean().backward()
    model = ddp.module
    del ddp
    again = made_anew(model, state)
    train(again, rank, range(4, 6))
    state.check_ledger()
    return state.step, digest(again)


def test_a_step_is_abandoned_when_all_of_it_is_on_its_way(ranks):
    first, second = ranks.run(2, abandoned_at_the_end)
    assert first == second
    assert first[0] == 6


def delayed_modes(rank, world_size):
    modes = ({}, {"static_graph": True}, {"find_unused_parameters": True})
    seen = []
    settings = {"ledger": True, "sample_every": 2, "dense_every": 3}
    for mode in (*modes, {"gradient_as_bucket_view": True}):
        ddp, state = hooked(mode=mode, delayed=True, **settings)
        state.check_ledger()
        assert state.stats()["step"] == -1
        train(ddp, rank, range(5))
        with ddp.no_sync():
            ddp(batch(rank, 5)).square().mean().backward()
        train(ddp, rank, range(6, 8))
        state.check_ledger()
        assert state.stats()["sampled"]["step"] == 6
        seen.append(digest(ddp))
    with ddp.join():
        train(ddp, rank, range(8, 9 + 2 * rank))
    train(ddp, rank, range(11, 13))
    state.check_ledger()
    ck.check_sync(ddp, gradients=True, buffers=False)
    return seen, state.step


def test_delayed_in_every_mode_and_with_uneven_inputs(ranks):
    (first, step), (second, _) = ranks.run(2, delayed_modes)
    assert set(first) == set(second) == {first[0]}
    assert step == 12


def delayed_scaler(rank, world_size, settings):
    ddp = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = ck.register(ddp, FOUR, delayed=True, grad_scaler=scaler, **settings)
    for step in range(8):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if step == 3 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if "ledger" in settings:
        state.check_ledger()
    skipped = state.stats()["total"]["skipped"]
    return scaler.get_scale(), digest(ddp), skipped


@pytest.mark.parametrize("settings", [{"ledger": True}, {"feedback": "ef21"}])
def test_delayed_with_an_overflow(ranks, settings):
    first, second = ranks.run(2, delayed_scaler, settings)
    assert first == second
    assert first[2] == 1


def several_dtypes(rank, world_size):
    torch.manual_seed(rank)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
    values = {f"p{i}": torch.randn(40, 40).to(d) for i, d in enumerate(dtypes)}
    ddp, state = registered(values, FOUR, delayed=True)
    reduced(ddp, values)
    mine, full = state.state_dict()["pending"], state.full_state_dict()["pending"]
    for name, result in mine.items():
        torch.testing.assert_close(full[name], result, rtol=0, atol=0)
    state.load_state_dict(state.full_state_dict())
    copy.deepcopy(state).bind(ddp)
    due = reduced(ddp, values)
    assert torch.equal(due["p2"].reshape(-1), mine["p2"])


def test_what_is_due_keeps_its_dtype(ranks):
    ranks.run(2, several_dtypes)


def damaged_states(rank, world_size):
    ddp, state = hooked(delayed=True)
    train(ddp, rank, range(2))
    saved = state.state_dict()
    for wrong in ("x", None, torch.zeros(64, dtype=torch.int8)):
        due = saved["pending"] | {"layers.0.bias": wrong}
        with pytest.raises(TypeError, match=r"layers\.0\.bias"):
            state.load_state_dict(saved | {"pending": due})
    _, state = hooked("auto")
    saved = state.state_dict()
    lacking = [["choice", None]]
    for wrong in ({"auto": 5}, {"auto": lacking}, {"auto_samples": [[1, 2]]}):
        with pytest.raises(ValueError, match="damaged"):
            state.load_state_dict(saved | {"step": 7} | wrong)
        assert state.step == 0


def test_a_damaged_choice_or_result_is_refused(ranks):
    ranks.run(1, damaged_states)


def mistaken(rank, world_size):
    group = dist.new_group([rank])
    ddp = DistributedDataParallel(torch.nn.Linear(40, 40), process_group=group)
    state = ck.register(ddp, FOUR, learning_rate=lambda: None)
    with pytest.raises(ValueError, match=r"has 1 of its 2 ranks"):
        state.per_rank(saved_world_size=1)  # would be rank 0's, on both
    with pytest.raises(TypeError, match=f"candidates.*{FOUR!r}"):
        ck.Auto(candidates=FOUR)
    with pytest.raises(TypeError, match=r"learning_rate\(\).*None"):
        ddp(torch.zeros(1, 40)).sum().backward()
    module, scale = torch.nn.Module(), 1.0 + rank  # the same integers
    quantized = torch.quantize_per_tensor(torch.ones(2) * scale, scale, 0, torch.qint8)
    module.register_buffer("q", quantized)
    with pytest.raises(TypeError, match="quantized"):
        ck.check_sync(module)


@pytest.mark.filterwarnings("ignore")
def test_what_would_be_taken_for_something_else_is_refused(ranks):
    ranks.run(2, mistaken)


def auto_before_start(rank, world_size, how):
    ddp, state = hooked(ck.Auto(rounds=3), start_step=40, exempt=None)
    train(ddp, rank, range(2))
    if how == "rejoin":
        state.rejoin(dist.new_group([0, 1]))
    else:
        state.load_state_dict(state.full_state_dict(), reset=how == "reset")
    state.reducer.timeline.clock = Clock(state, (100, 50, 10))
    train(ddp, rank, range(2, 52))
    return str(state.compressor.choice), state.compressor.sentence()


@pytest.mark.filterwarnings("ignore:reset=True")
@pytest.mark.parametrize("how", ["full", "reset", "rejoin"])
def test_auto_tries_nothing_before_start_step(ranks, how):
    for choice, sentence in ranks.run(2, auto_before_start, how):
        assert choice == FULL[2], sentence


def held_back_over_a_bad_step(rank, world_size):
    auto = ck.Auto(rounds=3, margin=0.0)
    ddp, state = hooked(auto, ledger=True, exempt=None)
    state.reducer.timeline.clock = Clock(state, (10, 50, 100))
    for step in range(16):
        ddp.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        if step in (12, 13) and rank == 1:  # the first dense ones for good
            loss = loss * float("inf")
        loss.backward()
    state.check_ledger()
    return str(state.compressor.choice), state.stats()["residual_norm"]


def test_what_auto_held_back_travels_after_a_skipped_step(ranks):
    assert ranks.run(2, held_back_over_a_bad_step) == [("identity", 0.0)] * 2


def auto_and_dense_steps(rank, world_size):
    for every in (1, 3):
        with pytest.raises(ValueError, match=f"3 compressors.*dense_every={every}"):
            hooked("auto", dense_every=every)


def test_auto_refuses_dense_steps_that_hide_a_candidate(ranks):
    ranks.run(1, auto_and_dense_steps)
