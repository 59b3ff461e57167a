"""Checkpoints: plain values, keyed by name, bitwise resume."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from tests.hook.models import digest, everything, make, train

import commkern as ck


def resume(rank, world_size, spec):
    ddp = make()
    state = ck.register(ddp, spec, seed=5)
    train(ddp, rank, range(3))
    file = io.BytesIO()
    torch.save({"hook": state.state_dict(), "model": ddp.module.state_dict()}, file)
    train(ddp, rank, range(3, 6))
    file.seek(0)
    saved = torch.load(file)

    again = make(seed=99)
    again.module.load_state_dict(saved["model"])
    restored = ck.register(again, spec, seed=5)
    restored.load_state_dict(saved["hook"])
    train(again, rank, range(3, 6))
    return digest(ddp), digest(again), restored.step


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_resume_is_equal_in_bits(ranks, world_size):
    for spec in everything():
        for straight, resumed, step in ranks.run(world_size, resume, spec):
            assert straight == resumed, spec
            assert step == 6


def saved_file(rank, world_size, path):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(3))
    if rank == 0:
        torch.save({"hook": state.state_dict()}, path)


def test_torch_load_needs_nothing_of_commkern(ranks, tmp_path):
    path = tmp_path / "state.pt"
    ranks.run(2, saved_file, str(path))
    code = (
        "import sys, torch; "
        f"d = torch.load({str(path)!r})['hook']; "
        "assert 'commkern' not in sys.modules; print(d['step'], len(d['residuals']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3", "4"]


def full_state(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    train(ddp, rank, range(2))
    full = state.full_state_dict()
    own = state.state_dict()
    restored = ck.CompressionState(None, "quantize:bits=4", module=ddp.module)
    restored.load_state_dict(full)
    return own, full, restored.state_dict()["residuals"]


def test_full_state_dict_is_the_mean_residual(ranks):
    results = ranks.run(4, full_state)
    for name in results[0][1]["residuals"]:
        mean = sum(own["residuals"][name].double() for own, _, _ in results) / 4
        for _, full, loaded in results:
            assert torch.allclose(full["residuals"][name].double(), mean, atol=1e-9)
            assert torch.equal(full["residuals"][name], loaded[name])


def refused(rank, world_size, other):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    saved = state.state_dict()
    renamed = dict(saved["residuals"])
    renamed["layers.9.weight"] = renamed.pop("layers.0.weight")
    cases = {
        "rank": saved | {"rank": 1 - rank},
        "world": saved | {"world_size": 4},
        "names": saved | {"residuals": renamed},
        "compressor": saved | {"compressor": "identity"},
        "format": saved | {"format": 99},
        "step": saved | {"step": -1},
        "residuals": saved | {"residuals": None},
    }
    texts = {}
    for name, case in cases.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            state.load_state_dict(case)
        texts[name] = str(caught.value)
    state.load_state_dict(cases["compressor"], strict=False)
    state.load_state_dict(cases["names"], strict=False)
    return texts


def test_what_does_not_fit_is_refused(ranks):
    texts = ranks.run(2, refused, None)[0]
    assert "full_state_dict" in texts["rank"]
    assert "of 4" in texts["world"]
    assert "layers.0.weight" in texts["names"]
    assert "layers.9.weight" in texts["names"]
    assert "identity" in texts["compressor"]
    assert "99" in texts["format"]
    assert "-1" in texts["step"]
    assert "None" in texts["residuals"]
