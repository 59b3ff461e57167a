"""States that were made for the bare model, and so know nothing of DDP at first."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
import torch.distributed as dist
from tests.hook.recording import descend, heads
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def half_of(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


def on_half(rank, make_group, hook=ck.compression_hook):
    """What backward gives with DDP over half of the world; gradients 1, 3 and 5, 7."""
    half = half_of(rank)
    model = torch.nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=half)
    state = ck.CompressionState(make_group(half), "identity", module=model)
    ddp.register_comm_hook(state, hook)
    results = []
    for _ in range(2):
        loss = ddp(torch.full((1, 4), 2.0 * rank + 1)).sum()
        try:
            loss.backward()
        except ValueError as error:
            results.append(str(error))
        else:
            results.append(model.weight.grad[0, 0].item())
            model.zero_grad()
    return results


def wrapping_hook(state, bucket):
    """Another object is registered than the state itself."""
    return ck.compression_hook(state, bucket)


def bare(rank, world_size, given):
    if given == "wrapped":
        half = half_of(rank)
        model = torch.nn.Linear(4, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=half)
        state = ck.CompressionState(None, "identity", module=model)
        ddp.register_comm_hook([state], lambda s, bucket: wrapping_hook(s[0], bucket))
        with pytest.raises(ValueError, match="made for the bare model") as caught:
            ddp(torch.ones(1, 4)).sum().backward()
        return [str(caught.value)] * 2
    groups = {
        "nothing": lambda half: None,
        "the world": lambda half: dist.group.WORLD,
        "right on two": lambda half: half if rank > 1 else None,
        "the same ranks": lambda half: half_of(rank),
    }
    return on_half(rank, groups[given])


@pytest.mark.parametrize("given", ["nothing", "the world", "wrapped"])
def test_other_ranks_than_those_of_ddp_are_refused_on_every_rank(ranks, given):
    for rank, texts in enumerate(ranks.run(4, bare, given, group_timeout_s=10)):
        for text in texts:  # the worker raises its first error again
            assert "over 4 ranks (0, 1, 2, 3)" in text
            assert f"over 2 ranks ({'0, 1' if rank < 2 else '2, 3'})" in text
            assert "process_group=" in text


def test_the_ranks_that_are_right_go_on(ranks):
    results = ranks.run(4, bare, "right on two", group_timeout_s=10)
    assert results[2:] == [[6.0, 6.0]] * 2
    assert all("4 ranks" in text for texts in results[:2] for text in texts)


def test_another_group_of_the_same_ranks_is_taken(ranks):
    assert ranks.run(4, bare, "the same ranks") == [[2.0, 2.0]] * 2 + [[6.0, 6.0]] * 2


def twice_wrapped(rank, world_size):
    """Another DDP module over the same model, which is not the one that calls."""
    model = torch.nn.Linear(4, 1, bias=False)
    whole = DistributedDataParallel(model)
    half = DistributedDataParallel(model, process_group=half_of(rank))
    state = ck.CompressionState(None, "identity", module=model)
    half.register_comm_hook(state, ck.compression_hook)
    loss = half(torch.ones(1, 4)).sum()
    with pytest.raises(ValueError, match="but DDP over 2 ranks"):
        loss.backward()
    return whole.module is model


def test_the_module_that_the_state_is_registered_with_counts(ranks):
    assert all(ranks.run(4, twice_wrapped, group_timeout_s=10))


def looked_for(rank, world_size):
    """How often the objects of the process are gone through, in six steps."""
    calls = []
    listed = gc.get_objects
    model = torch.nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    other = DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp.register_comm_hook(ck.CompressionState(module=model), ck.compression_hook)
    ck.register(other)
    gc.get_objects = lambda *_: calls.append(None) or listed()
    try:
        for _ in range(3):
            (ddp(torch.ones(1, 4)) + other(torch.ones(1, 4))).sum().backward()
    finally:
        gc.get_objects = listed
    return len(calls)


def test_ddp_is_looked_for_once_and_only_by_states_of_bare_models(ranks):
    assert ranks.run(2, looked_for) == [1, 1]


def beside_an_empty_one(rank, world_size):
    empty = DistributedDataParallel.__new__(DistributedDataParallel)
    return looked_for(rank, world_size), vars(empty)


def test_a_ddp_module_that_is_not_made_yet_is_passed_over(ranks):
    assert ranks.run(2, beside_an_empty_one) == [(1, {})] * 2


def frozen(rank, world_size, freeze):
    """What is logged where the garbage collector does not show the DDP module."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    model = torch.nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    state = ck.CompressionState(module=model, exempt=None)
    ddp.register_comm_hook(state, ck.compression_hook)
    logging.getLogger("commkern").addHandler(handler)
    if freeze:
        gc.freeze()
    try:
        for _ in range(2):
            ddp(torch.ones(1, 4)).sum().backward()
    finally:
        gc.unfreeze()
        logging.getLogger("commkern").removeHandler(handler)
    return [text for text in told if "gc.freeze" in text]


@pytest.mark.parametrize("freeze", [True, False])
def test_a_ddp_module_that_cannot_be_found_is_reported_once(ranks, freeze):
    for told in ranks.run(2, frozen, freeze):
        assert len(told) == freeze
        assert all("over 2 ranks (0, 1)" in text for text in told)


def skipping(rank, world_size):
    ddp = heads(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    state = ck.CompressionState(None, "quantize:bits=4", module=ddp.module)
    ddp.register_comm_hook(state, ck.compression_hook)
    loss = ddp(torch.ones(16, 40), "a").square().mean()
    with pytest.raises(ValueError, match=r"skip_all_reduce_unused_params=True"):
        loss.backward()
    descend(ddp)
    return state.step


def test_a_mode_that_the_hook_does_not_serve_is_refused_in_the_first_backward(ranks):
    assert ranks.run(2, skipping, group_timeout_s=10) == [0, 0]
