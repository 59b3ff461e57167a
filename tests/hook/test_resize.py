"""Going on with another number of ranks: the mean of the residuals is kept."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import make, train

import commkern as ck


def with_known_residuals(rank, world_size):
    """Residuals of rank r are full(r + 1)."""
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(2))
    for name in state.residuals.names():
        state.residuals[name].fill_(rank + 1.0)
    return state.state_dict(), state.full_state_dict()


def loaded(rank, world_size, full, own):
    state = ck.register(make(), "quantize:bits=4")
    with pytest.raises(ValueError, match=r"full_state_dict.*merge_state_dicts"):
        state.load_state_dict(own[rank % len(own)])
    state.load_state_dict(full)
    return state.state_dict()["residuals"], state.step


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_mean_is_kept(ranks, world_size):
    saved = ranks.run(4, with_known_residuals)
    own = [state for state, _ in saved]
    for full in (saved[2][1], ck.merge_state_dicts(reversed(own))):
        results = ranks.run(world_size, loaded, full, own)
        for name in full["residuals"]:
            mean = sum(residuals[name] for residuals, _ in results) / world_size
            assert torch.equal(mean, torch.full((4096,), 2.5))
        assert [step for _, step in results] == [2] * world_size


def trained(rank, world_size, full, steps):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", ledger=True)
    if full is not None:
        ddp.module.load_state_dict(full["model"])
        state.load_state_dict(full["hook"])
    train(ddp, rank, steps)
    worst = max(state.check_ledger().values())
    parts = {"model": ddp.module.state_dict(), "hook": state.full_state_dict()}
    return worst, parts, state.state_dict()


def test_the_ledger_holds_from_4_ranks_to_2_to_3(ranks):
    full, start = None, 0
    for world_size in (4, 2, 3):
        results = ranks.run(world_size, trained, full, range(start, start + 3))
        assert max(worst for worst, _, _ in results) < 1e-5
        full, start = results[0][1], start + 3
        assert full["hook"]["step"] == start
        merged = ck.merge_state_dicts(own for _, _, own in results)
        assert merged.keys() == full["hook"].keys()
        for key in ("residuals", "ledger_given", "ledger_returned", "ledger_rounding"):
            for name, value in full["hook"][key].items():
                torch.testing.assert_close(merged[key][name], value)
                assert value._base is None
        assert merged["rank"] == -1


def test_merging_names_what_is_missing(ranks):
    own = [state for state, _ in ranks.run(3, with_known_residuals)]
    name = "layers.1.weight"
    without = own[1] | {
        "residuals": {k: v for k, v in own[1]["residuals"].items() if k != name}
    }
    cases = {
        r"got ranks \[0, 1\], missing are \[2\]": own[:2],
        r"got ranks \[0, 1, 1, 2\], missing are \[\]": [*own, own[1]],
        "got none": [],
        "step is 2 on rank 0 and 5 on rank 2": [*own[:2], own[2] | {"step": 5}],
        f"residuals of '{name}' is not there on all": [own[0], without, own[2]],
        "format: this state has 2, the saved one None": [{}],
    }
    for pattern, states in cases.items():
        with pytest.raises(ValueError, match=pattern):
            ck.merge_state_dicts(states)
