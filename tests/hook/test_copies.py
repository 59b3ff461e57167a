"""Pickled and deep-copied states, and what becomes of the hook of a copied DDP."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tests.hook.models import batch, digest, make, train
from tests.hook.test_resume import same

import commkern as ck

SPEC = "quantize:bits=4,rounding=stochastic"
COPIES = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "twice": lambda state: copy.deepcopy(pickle.loads(pickle.dumps(state))),
}


def keep_all(name, parameter):
    return False


def copied(rank, world_size, how):
    ddp = make()
    state = ck.register(ddp, SPEC, seed=4, exempt=keep_all, rollback=False, ledger=True)
    train(ddp, rank, range(3))
    twin = COPIES[how](state)
    assert same(twin.state_dict(), state.state_dict())
    at_three = state.state_dict()
    again = make(seed=99)
    again.module.load_state_dict(ddp.module.state_dict())
    again.register_comm_hook(twin, ck.compression_hook)
    train(ddp, rank, range(3, 6))
    assert same(twin.state_dict(), at_three)  # a copy, not a view

    twin.bind(again)
    train(again, rank, range(3, 6))
    assert same(twin.state_dict(), state.state_dict())
    assert twin.report() == state.report()
    assert twin.stats()["state_nbytes"] == state.stats()["state_nbytes"]
    return digest(ddp), digest(again), twin.step


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_as_the_original_does(ranks, how):
    for straight, resumed, step in ranks.run(2, copied, how):
        assert straight == resumed
        assert step == 6


def unbound(rank, world_size):
    ddp = make()
    twin = pickle.loads(pickle.dumps(ck.register(ddp, SPEC)))
    calls = {
        "step": lambda: twin.step,
        "stats": twin.stats,
        "report": twin.report,
        "load": lambda: twin.load_state_dict(twin.state_dict()),
        "rejoin": twin.rejoin,
        "full": twin.full_state_dict,
        "ledger": twin.check_ledger,
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"call state\.bind\(ddp\) first"):
            call()
    again = make()
    again.register_comm_hook(twin, ck.compression_hook)
    with pytest.raises(ValueError, match=r"call state\.bind\(ddp\) first"):
        again(batch(rank, 0)).square().mean().backward()


def test_an_unbound_copy_says_so(ranks):
    ranks.run(2, unbound)


def bound_elsewhere(rank, world_size, packed):
    texts = {}
    cases = {
        "rank": lambda twin: twin.bind(make()),
        "module": lambda twin: twin.bind(torch.nn.Linear(4, 4)),
        "type": lambda twin: twin.bind(5),
    }
    for key, case in cases.items():
        twin = pickle.loads(packed)
        with pytest.raises((ValueError, TypeError)) as caught:
            case(twin)
        texts[key] = str(caught.value)
        with pytest.raises(ValueError, match=r"state\.bind"):
            _ = twin.step  # as before
        assert twin.state_dict()["step"] == 2
    return texts


def trained_and_packed(rank, world_size):
    ddp = make()
    state = ck.register(ddp, SPEC)
    train(ddp, rank, range(2))
    return pickle.dumps(state)


def test_binding_checks_rank_and_module(ranks):
    packed = ranks.run(2, trained_and_packed)[0]
    texts = ranks.run(1, bound_elsewhere, packed)[0]
    assert "rank 0 of 1, the state is that of rank 0 of 2" in texts["rank"]
    assert "rank 0 of 2" in texts["module"]
    assert "got int" in texts["type"]


def followed(rank, world_size):
    ddp = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    state = ck.register(ddp, SPEC, grad_scaler=scaler, learning_rate=lambda: 0.1)
    twin = pickle.loads(pickle.dumps(state))  # lambda and scaler are left out
    for given, lacking in (
        ({}, "grad_scaler"),
        ({"grad_scaler": scaler}, "learning_rate"),
    ):
        with pytest.raises(ValueError, match=f"followed a {lacking}.*{lacking}=None"):
            twin.bind(make(), **given)
    twin.bind(make(), grad_scaler=scaler, learning_rate=lambda: 0.1)
    again = make()
    state.bind(again)  # bound already: what it follows is known
    again.register_comm_hook(state, ck.compression_hook)
    train(again, rank, range(2))
    return state.state_dict()["learning_rate"], state.step


def test_what_a_state_follows_is_given_anew(ranks):
    assert ranks.run(2, followed) == [(0.1, 2)] * 2


def freed(rank, world_size):
    """Nothing that a state keeps for its copies keeps the module alive."""
    ddp = make()
    ck.register(ddp, SPEC)
    train(ddp, rank, range(2))
    module = weakref.ref(ddp)
    del ddp
    gc.collect()
    return module() is None


def test_a_state_does_not_hold_its_module(ranks):
    assert ranks.run(1, freed) == [True]


def module_copies(rank, world_size, how):
    """torch copies a DDP module without its hook."""
    ddp = make()
    state = ck.register(ddp, SPEC)
    train(ddp, rank, range(3))
    twin = COPIES[how](ddp)
    plain = make()
    plain.module.load_state_dict(ddp.module.state_dict())
    train(plain, rank, range(3, 5))
    silent = COPIES[how](twin)
    train(silent, rank, range(3, 5))

    moved = copy.deepcopy(state)
    moved.bind(twin)
    twin.register_comm_hook(moved, ck.compression_hook)
    train(twin, rank, range(3, 6))
    train(ddp, rank, range(3, 6))
    return digest(silent) == digest(plain), digest(twin) == digest(ddp), moved.step


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copied_ddp_module(ranks, how):
    assert ranks.run(2, module_copies, how) == [(True, True, 6)] * 2
