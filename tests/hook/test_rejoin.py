"""Going on in a new group: all ranks go back to the lowest committed step, or none."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from tests.hook.models import batch, make, train

import commkern as ck


def as_if_not_committed(state):
    state.residuals.undo()
    state.step -= 1


def cannot_go_back(rank, world_size, why):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", rollback=why != "one version")
    train(ddp, rank, range(3))
    if rank == 0:
        state.step -= 2 if why == "two steps" else 1
    if rank == 1 and why == "loaded":
        state.load_state_dict(state.state_dict())
    before = state.state_dict()["residuals"]
    with pytest.raises(ValueError, match="load a checkpoint") as caught:
        state.rejoin(dist.new_group([0, 1]))
    after = state.state_dict()["residuals"]
    assert all((before[name] == after[name]).all() for name in before)
    return str(caught.value)


@pytest.mark.parametrize("why", ["one version", "two steps", "loaded"])
def test_every_rank_is_told_that_one_cannot_go_back(ranks, why):
    texts = ranks.run(2, cannot_go_back, why)
    lowest = 1 if why == "two steps" else 2
    reached = 2 if why == "two steps" else 3
    for text, step in zip(texts, (lowest, 3), strict=True):
        assert f"committed step is {lowest}" in text
        assert f"can go back to {reached} only" in text
        assert f"this one is at step {step}" in text


def next_step_has_begun(rank, world_size):
    """Rank 1 has begun to write over the version that it would go back to."""
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(3))
    if rank == 0:
        as_if_not_committed(state)
    else:
        loss = ddp(batch(rank, 3)).square().mean()
        with pytest.raises(ck.PeerLost):
            loss.backward()
    with pytest.raises(ValueError, match="go back to 3 only"):
        state.rejoin(dist.new_group([0, 1]))


def test_a_step_that_has_begun_cannot_be_undone(ranks):
    ranks.run(2, next_step_has_begun, group_timeout_s=6, timeout_s=50)
