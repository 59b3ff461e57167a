"""What a saved state holds, and what loading refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from tests.hook.models import everything, make, train

import commkern as ck

PLAIN = (int, float, str, type(None))


def saved_state(rank, world_size, spec, path):
    ddp = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    state = ck.register(
        ddp, spec, grad_scaler=scaler, learning_rate=lambda: 0.1, ledger=True
    )
    train(ddp, rank, range(3))
    if rank == 0:
        torch.save(state.state_dict(), path)
    return state.state_dict()


def leaves(value):
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]


def test_torch_load_needs_nothing_of_commkern(ranks, tmp_path):
    paths = [str(tmp_path / f"{index}.pt") for index in range(len(everything()))]
    for spec, path in zip(everything(), paths, strict=True):
        saved = ranks.run(1, saved_state, spec, path)[0]
        for leaf in leaves(saved):
            assert type(leaf) is torch.Tensor or type(leaf) in PLAIN, type(leaf)
    code = (
        "import sys, torch; "
        f"saved = [torch.load(path) for path in {paths}]; "
        "assert 'commkern' not in sys.modules; "
        "print(*(d['step'] * len(d['residuals']) for d in saved))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    held = ["0" if spec == "identity" else "12" for spec in everything()]
    assert done.stdout.split() == held


def test_a_view_is_not_saved_with_all_that_it_is_a_view_of(ranks, tmp_path):
    path = tmp_path / "state.pt"
    saved = ranks.run(2, saved_state, "quantize:bits=4", str(path))[0]
    tensors = [x for x in leaves(saved) if isinstance(x, torch.Tensor)]
    assert path.stat().st_size < 1.2 * sum(t.nbytes for t in tensors)


WEIGHT = "layers.0.weight"
DAMAGES = {
    "rank": (lambda d: d.update(rank=1 - d["rank"]), "reset=True.*per_rank"),
    "world size": (lambda d: d.update(world_size=4), "rank 0 of 2, .* rank 0 of 4"),
    "compressor": (lambda d: d.update(compressor="identity"), "bits=4.*'identity'"),
    "feedback": (lambda d: d.update(feedback="other"), "'error', .*'other'"),
    "seed": (lambda d: d.update(seed=1), "seed: .* 0, .* 1"),
    "format": (lambda d: d.update(format=1), "format: .* 2, .* 1"),
    "no format": (lambda d: d.pop("format"), "format: .* None"),
    "no step": (lambda d: d.pop("step"), "lacks .'step'."),
    "step": (lambda d: d.update(step=-1), "0 or more, got -1"),
    "true": (lambda d: d.update(step=True), "got True"),
    "loss scale": (lambda d: d.update(loss_scale=float("nan")), "loss_scale.*nan"),
    "rate": (lambda d: d.update(learning_rate="0.1"), "learning_rate.*'0.1'"),
    "no dict": (lambda d: d.update(residuals=[1]), r"residuals .* dict, got \[1\]"),
    "none": (lambda d: d.pop("residuals"), "residuals .* dict, got None"),
    "renamed": (
        lambda d: d["residuals"].update(other=d["residuals"].pop(WEIGHT)),
        r"missing in the saved state \['layers.0.weight'\], unexpected \['other'\]",
    ),
    "list": (lambda d: d["residuals"].update({WEIGHT: [0.0] * 4096}), "got list"),
    "dtype": (
        lambda d: d["residuals"].update({WEIGHT: torch.zeros(4096).double()}),
        "dtype of residuals of 'layers.0.weight'.*float32, .*float64",
    ),
    "numel": (
        lambda d: d["residuals"].update({WEIGHT: torch.zeros(7)}),
        "elements of residuals of 'layers.0.weight'.* 4096, .* 7",
    ),
    "nan": (
        lambda d: d["residuals"][WEIGHT][5].fill_(float("nan")),
        "finite, 1 of 4096",
    ),
    "ledger": (
        lambda d: d["ledger_given"][WEIGHT][5].fill_(float("inf")),
        "ledger_given of 'layers.0.weight'.*finite",
    ),
    "ledger names": (
        lambda d: d["ledger_returned"].pop(WEIGHT),
        r"ledger_returned: .*missing .*\['layers.0.weight'\]",
    ),
}


def damaged(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", ledger=True)
    saved = state.state_dict()
    train(ddp, rank, range(2))
    before = state.state_dict()
    texts = {}
    for key, (damage, _) in DAMAGES.items():
        broken = copy.deepcopy(saved)
        damage(broken)
        with pytest.raises((ValueError, TypeError)) as caught:
            state.load_state_dict(broken)
        texts[key] = str(caught.value)
        after = state.state_dict()
        for kept, now in zip(leaves(before), leaves(after), strict=True):
            tensor = isinstance(kept, torch.Tensor)
            assert torch.equal(kept, now) if tensor else kept == now, key
    with pytest.raises(TypeError, match="expected a state_dict, got list"):
        state.load_state_dict([])
    return texts


def test_what_is_damaged_is_refused_and_changes_nothing(ranks):
    texts = ranks.run(2, damaged)[0]
    for key, (_, pattern) in DAMAGES.items():
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(texts[key])


def not_strict(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(2))
    saved = state.state_dict()
    saved["residuals"]["other"] = saved["residuals"].pop(WEIGHT)
    saved |= {"compressor": "sign", "seed": 7}
    state.load_state_dict(saved, strict=False)
    loaded = state.state_dict()["residuals"]
    kept = [n for n in loaded if n != WEIGHT]
    assert all(torch.equal(loaded[n], saved["residuals"][n]) for n in kept)
    return loaded[WEIGHT].count_nonzero().item(), state.step


def test_not_strict_takes_what_fits(ranks):
    assert ranks.run(2, not_strict) == [(0, 2)] * 2


def reset(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4", ledger=True)
    train(ddp, rank, range(3))
    saved = state.state_dict()
    saved["residuals"]["old.weight"] = saved["residuals"].pop(WEIGHT)
    saved |= {"rank": 5, "world_size": 8, "compressor": "sign"}
    train(ddp, rank, range(3, 5))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        state.load_state_dict(saved, reset=True)
    loaded = state.state_dict()
    zeros = [not r.any() for r in loaded["residuals"].values()]
    train(ddp, rank, range(3, 6))
    worst = max(state.check_ledger().values())
    texts = [str(w.message) for w in seen]
    here = [w.filename == __file__ for w in seen]
    return loaded["step"], zeros, worst, texts, here, state.step


def test_reset_keeps_the_step_and_warns_once(ranks):
    for step, zeros, worst, texts, here, end in ranks.run(2, reset):
        assert (step, end) == (3, 6)
        assert zeros == [True] * 4
        assert worst < 1e-5
        assert len(texts) == 1
        assert "step 3 with zero residuals" in texts[0]
        assert "residuals of 4 parameters (layers.1.weight, layers.2.w" in texts[0]
        assert "ledger_given of 8 parameters" in texts[0]
        assert here == [True]


def without_sums(rank, world_size):
    """A state without sums, loaded where the ledger is on, and the other way round."""
    ddp = make()
    plain = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(3))
    again = make()
    again.module.load_state_dict(ddp.module.state_dict())
    state = ck.register(again, "quantize:bits=4", ledger=True)
    state.load_state_dict(plain.state_dict())
    train(again, rank, range(3, 6))
    plain.load_state_dict(state.state_dict())
    return state.check_ledger(), plain.step


def test_sums_start_at_the_residuals_that_are_loaded(ranks):
    for differences, step in ranks.run(2, without_sums):
        assert max(differences.values()) < 1e-5
        assert step == 6
