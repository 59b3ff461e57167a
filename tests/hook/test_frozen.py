"""Parameters that are frozen, or kept from the hook; backward passes without an end."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, digest
from tests.hook.recording import Heads, Recorder, check_ledger, descend, heads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def frozen(rank, world_size, keep_state, spec="quantize:bits=4"):
    """Head b is frozen for 3 steps, then trained; body is frozen after 6. DDP wants to
    be made anew whenever what is trained changes; the residuals go with the state, or
    with its state_dict."""
    torch.manual_seed(0)
    model = Heads()
    model.b.requires_grad_(False)
    sums, held, state = [], [], None
    for phase in range(3):
        if phase == 1:
            model.b.requires_grad_(True)
        if phase == 2:
            model.body.requires_grad_(False)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
        recorder = Recorder(ddp, spec)
        if state is not None and keep_state:
            recorder.state = state
        elif state is not None:
            recorder.state.load_state_dict(state.state_dict(), strict=False)
        state = recorder.state
        for step in range(3):
            ddp(batch(rank, 10 * phase + step, 40)).square().mean().backward()
            recorder.note()
            descend(ddp)
        sums.append(recorder.summary())
        held.append(set(sums[-1][2]))
    return sums, held, state.step, digest(ddp)


@pytest.mark.parametrize("keep_state", [True, False])
def test_freezing_and_unfreezing(ranks, keep_state):
    results = ranks.run(2, frozen, keep_state)
    assert results[0][3] == results[1][3]
    for _, held, step, _ in results:
        assert step == 9
        assert not any(name.startswith("b.") for name in held[0])
        assert "b.weight" in held[1]
        assert ("body.weight" in held[2]) == keep_state
    # Each name's ledger over all the phases that trained it.
    whole = []
    for sums, _, _, _ in results:
        local, outputs = {}, {}
        for phase in sums:
            for total, part in ((local, phase[0]), (outputs, phase[1])):
                for name, value in part.items():
                    total[name] = total.get(name, 0) + value
        residuals = sums[1][2] | sums[2][2]
        whole.append((local, outputs, residuals))
    check_ledger(whole)


def frozen_without_a_hook(rank, world_size):
    torch.manual_seed(0)
    model = Heads()
    for phase in range(3):
        model.b.requires_grad_(phase > 0)
        model.body.requires_grad_(phase < 2)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
        for step in range(3):
            ddp(batch(rank, 10 * phase + step, 40)).square().mean().backward()
            descend(ddp)
    return digest(ddp)


@pytest.mark.parametrize("keep_state", [True, False])
def test_freezing_and_unfreezing_is_as_without_a_hook(ranks, keep_state):
    plain = ranks.run(2, frozen_without_a_hook)
    hooked = ranks.run(2, frozen, keep_state, "identity")
    assert [result[3] for result in hooked] == plain


def frozen_under_a_live_ddp(rank, world_size, find_unused, spec="quantize:bits=4"):
    ddp = heads(find_unused_parameters=find_unused)
    recorder = Recorder(ddp, spec) if spec else None
    residuals = []
    for step in range(6):
        ddp.module.b.requires_grad_(step not in (2, 3))
        ddp(batch(rank, step, 40)).square().mean().backward()
        if recorder:
            recorder.note()
            held = recorder.state.state_dict()["residuals"]
            residuals.append(held.get("b.weight"))
        descend(ddp)
        if not find_unused and step == 2:
            with pytest.raises(RuntimeError, match="finished reduction"):
                ddp(batch(rank, step, 40))
            return None
    return recorder and recorder.summary(), residuals, digest(ddp)


def test_freezing_under_a_live_ddp_needs_find_unused_parameters(ranks):
    ranks.run(2, frozen_under_a_live_ddp, False)
    results = ranks.run(2, frozen_under_a_live_ddp, True)
    assert results[0][2] == results[1][2]
    check_ledger([summary for summary, _, _ in results])
    for _, residuals, _ in results:
        assert torch.equal(residuals[1], residuals[3])
        assert not torch.equal(residuals[3], residuals[4])
    plain, hooked = (
        [digest for *_, digest in ranks.run(2, frozen_under_a_live_ddp, True, spec)]
        for spec in (None, "identity")
    )
    assert hooked == plain
    assert plain[0] == plain[1] != results[0][2]


def ignored(rank, world_size, delayed):
    """Parameters that DDP leaves alone, or reduces by itself: not the hook's."""
    model, more = Heads(), {}
    named = [("b.weight", model.b.weight), ("b.bias", model.b.bias)]
    if delayed:
        more["delay_all_reduce_named_params"] = named
        more["param_to_hook_all_reduce"] = model.a.weight
    else:
        model._ddp_params_and_buffers_to_ignore = [name for name, _ in named]
    ddp = DistributedDataParallel(model, **more)
    state = ck.register(ddp, "quantize:bits=4", exempt=None)
    ddp(batch(rank, 0, 40)).square().mean().backward()
    mine = model.b.weight.grad.clone()
    return mine, sorted(state.report()), sorted(state.state_dict()["residuals"])


@pytest.mark.parametrize("delayed", [False, True])
def test_parameters_that_ddp_keeps_from_the_hook(ranks, delayed):
    expected = ["a.bias", "a.weight", "body.bias", "body.weight"]
    first, second = ranks.run(2, ignored, delayed)
    assert torch.equal(first[0], second[0]) == delayed
    assert first[1] == first[2] == expected


class Dtypes(nn.Module):
    """In the first step of a static graph DDP has a bucket for each dtype."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40, dtype=torch.float64)
        self.third = nn.Linear(40, 40, dtype=torch.bfloat16)

    def forward(self, x):
        return self.third(self.second(self.first(x).double()).bfloat16())


def counted(rank, world_size, change):
    """Steps counted and parameters with a residual after each of two backward passes,
    where what DDP reduces changed behind the state, which was made for the model."""
    model = Dtypes()
    if change == "ignore":
        model._ddp_params_and_buffers_to_ignore = ["second.weight"]
    model.first.requires_grad_(change != "unfreeze")
    state = ck.CompressionState(None, "quantize:bits=4", module=model, exempt=None)
    model.first.requires_grad_(True)
    model.second.weight.requires_grad_(change != "freeze")
    ddp = DistributedDataParallel(model, static_graph=True)
    ddp.register_comm_hook(state, ck.compression_hook)
    steps = []
    for step in range(2):
        ddp(batch(rank, step, 40)).float().square().mean().backward()
        residuals = state.state_dict()["residuals"].items()
        steps.append((state.step, {name for name, held in residuals if held.any()}))
    return steps


@pytest.mark.parametrize("change", ["freeze", "unfreeze", "ignore"])
def test_the_first_step_of_what_is_trained_now_is_committed(ranks, change):
    layers = ("first", "second", "third")
    every = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    names = every - (set() if change == "unfreeze" else {"second.weight"})
    for steps in ranks.run(2, counted, change):
        assert steps == [(1, names), (2, names)]


def refused(rank, world_size):
    ddp = heads(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with pytest.raises(ValueError, match=r"skip_all_reduce_unused_params=True"):
        ck.register(ddp, "identity")
    return True


def test_what_would_pass_the_hook_by_is_refused(ranks):
    assert all(ranks.run(2, refused))


class Interruption(Exception):  # noqa: N818
    pass


def interrupt(_):
    raise Interruption


def abandoned(rank, world_size, interrupted):
    """The second backward pass ends in an exception of user code after some buckets,
    with a NaN in them. DDP must then be made anew; the state serves on, as if that
    pass had not been."""
    torch.manual_seed(0)
    model, state = Heads(), None
    recorder = None
    for step in range(5):
        if step != 1:
            if step in (0, 2):
                ddp = DistributedDataParallel(
                    model, bucket_cap_mb=0.005, find_unused_parameters=True
                )
                recorder = Recorder(ddp, "quantize:bits=4")
                recorder.state = state = state or recorder.state
            ddp(batch(rank, step, 40)).square().mean().backward()
            descend(model)
        elif interrupted:
            handle = model.body.weight.register_hook(interrupt)
            loss = ddp(batch(rank, step, 40)).square().mean()
            with pytest.raises(Interruption):
                (loss * float("nan")).backward()
            handle.remove()
            model.zero_grad()
            assert [len(buckets) for buckets in recorder.buckets] == [4, 3]
    return digest(ddp), state.step, state.state_dict()["residuals"]["a.weight"].norm()


def test_a_backward_pass_that_was_abandoned_leaves_no_trace(ranks):
    results = ranks.run(2, abandoned, True)
    assert results == ranks.run(2, abandoned, False)
    assert results[0][0] == results[1][0]
    assert results[0][1] == 4
