"""The hook's state in torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.hook.models import digest, make, train
from tests.hook.test_resume import same
from torch.distributed.checkpoint.stateful import Stateful

import commkern as ck

SPEC = "quantize:bits=4,rounding=stochastic"


def hooked(seed=0, **settings):
    ddp = make(seed=seed)
    return ddp, ck.register(ddp, SPEC, **settings)


def save_and_resume(rank, world_size, path, asynchronous):
    ddp, state = hooked(ledger=True)
    train(ddp, rank, range(3))
    parts = {"model": ddp.module.state_dict(), "hook": state.per_rank()}
    saved = state.state_dict()
    if asynchronous:
        group = dist.new_group(backend="gloo")
        pending = dcp.async_save(parts, checkpoint_id=path, process_group=group)
        # The model is staged before async_save returns, and so must the hook be.
        train(ddp, rank, range(3, 6))
        pending.result()
    else:
        dcp.save(parts, checkpoint_id=path)
        train(ddp, rank, range(3, 6))

    again, restored = hooked(seed=99, ledger=True)
    parts = {"model": again.module.state_dict(), "hook": restored.per_rank()}
    dcp.load(parts, checkpoint_id=path)
    again.module.load_state_dict(parts["model"])
    assert same(restored.state_dict(), saved)
    train(again, rank, range(3, 6))
    assert max(restored.check_ledger().values()) < 1e-5
    return digest(ddp), digest(again), restored.step, saved


@pytest.mark.parametrize(
    ("world_size", "asynchronous"), [(2, False), (4, False), (2, True)]
)
def test_resume_is_equal_in_bits(ranks, tmp_path, world_size, asynchronous):
    results = ranks.run(world_size, save_and_resume, str(tmp_path), asynchronous)
    for straight, resumed, step, _ in results:
        assert straight == resumed
        assert step == 6
    # Else a checkpoint that holds one rank's residuals would do.
    first, second = (saved["residuals"] for _, _, _, saved in results[:2])
    assert not same(first, second)


def saved_by(rank, world_size, path):
    ddp, state = hooked()
    train(ddp, rank, range(2))
    for name in state.residuals.names():
        state.residuals[name].fill_(rank + 1.0)
    dcp.save({"hook": state.per_rank()}, checkpoint_id=path)


def resized(rank, world_size, path):
    _, state = hooked()
    try:
        dcp.load({"hook": state.per_rank()}, checkpoint_id=path)
    except (ValueError, dcp.api.CheckpointException) as caught:
        refused = str(caught)
    dcp.load({"hook": state.per_rank(saved_world_size=4)}, checkpoint_id=path)
    values = {r.unique().tolist()[0] for r in state.state_dict()["residuals"].values()}
    return refused, values, state.step


@pytest.mark.parametrize(
    ("world_size", "text"), [(2, "of 2.* of 4.*per_rank"), (6, "Missing key.*rank_")]
)
def test_another_number_of_ranks_gets_the_mean(ranks, tmp_path, world_size, text):
    ranks.run(4, saved_by, str(tmp_path))
    refused = []
    for one, values, step in ranks.run(world_size, resized, str(tmp_path)):
        refused.append(one)
        assert values == {2.5}
        assert step == 2
    for one in refused:
        with pytest.raises(ValueError, match=f"(?s){text}"):
            raise ValueError(one)


def bare(rank, world_size, path):
    """The state itself: torch keeps one rank's residuals, and loading notices."""
    ddp, state = hooked()
    train(ddp, rank, range(2))
    assert isinstance(state, Stateful)
    dcp.save({"hook": state}, checkpoint_id=path)
    try:
        dcp.load({"hook": state}, checkpoint_id=path)
    except ValueError as error:
        return str(error)


def test_the_bare_state_is_refused_with_advice(ranks, tmp_path):
    texts = [text for text in ranks.run(2, bare, str(tmp_path)) if text]
    assert texts
    assert all("save and load state.per_rank()" in text for text in texts)


def full_state(rank, world_size, path, save):
    ddp, state = hooked()
    if save:
        train(ddp, rank, range(2))
        dcp.save({"hook": state.full_state_dict()}, checkpoint_id=path)
        return state.full_state_dict()
    room = {"hook": state.full_state_dict()}
    dcp.load(room, checkpoint_id=path)
    state.load_state_dict(room["hook"])
    return state.full_state_dict()


def test_the_full_state_needs_no_keys_of_ranks(ranks, tmp_path):
    saved = ranks.run(3, full_state, str(tmp_path), True)[0]
    for loaded in ranks.run(2, full_state, str(tmp_path), False):
        assert same(loaded, saved | {"world_size": 2})


def refused_sizes(rank, world_size):
    _, state = hooked()
    for wrong in (0, "4"):
        with pytest.raises(ValueError, match=f"got {wrong!r}"):
            state.per_rank(saved_world_size=wrong)


def test_the_number_of_ranks_is_checked(ranks):
    ranks.run(1, refused_sizes)
