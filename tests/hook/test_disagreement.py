"""Ranks whose hooks have different settings: every rank learns which, in time."""

from __future__ import annotations

import pytest
import torch
from tests.hook.given import Given
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

SPEC = "quantize:bits=8"


def exempt_bias(name, parameter):
    return name == "bias"


# What rank 0 and rank 1 have, and the field that both are told.
SETTINGS = {
    "bits": ({}, {"compressor": "quantize:bits=4"}, "compressor"),
    "block size": ({}, {"compressor": "quantize:bits=8,block_size=64"}, "compressor"),
    "rounding": ({}, {"compressor": "quantize:rounding=stochastic"}, "compressor"),
    "other coder": ({"compressor": "sign"}, {"compressor": "identity"}, "compressor"),
    "exempt": ({}, {"exempt": exempt_bias}, "compressor"),
    "start step": ({}, {"start_step": 1}, "compressor"),
    "seed": ({}, {"seed": 1}, "settings"),
    "non-finite values": ({}, {"nonfinite": "saturate"}, "settings"),
    "feedback": ({}, {"feedback": None}, "settings"),
    "roll-back": ({}, {"rollback": False}, "settings"),
    "dtype of residuals": ({}, {"residual_dtype": "bf16"}, "settings"),
    "loss scale": ({}, {"grad_scaler": torch.amp.GradScaler("cpu")}, "settings"),
    "learning rate": ({"learning_rate": lambda: 0.1}, {}, "settings"),
}
TOLD = {
    "bits": ("bits=8", "bits=4"),
    "dtype of residuals": ("residual_dtype='fp32'", "residual_dtype='bf16'"),
    "loss scale": ("grad_scaler=True", "grad_scaler=False"),
    "learning rate": ("learning_rate=True", "learning_rate=False"),
}
MODELS = {
    "shapes": (
        {"weight": torch.ones(40, 40), "bias": torch.ones(40)},
        {"weight": torch.ones(40, 50), "bias": torch.ones(40)},
    ),
    "dtypes": (
        {"weight": torch.ones(40, 40), "bias": torch.ones(40)},
        {"weight": torch.ones(40, 40).half(), "bias": torch.ones(40).half()},
    ),
    "parameter names": (
        {"weight": torch.ones(40, 40), "bias": torch.ones(40)},
        {"other": torch.ones(40, 40), "bias": torch.ones(40)},
    ),
}


def error_of(values, settings) -> str:
    ddp = DistributedDataParallel(Given(values), init_sync=False)
    defaults = {"compressor": SPEC, "exempt": None}
    ck.register(ddp, **defaults | settings)
    loss = ddp(values)
    with pytest.raises(ck.MismatchError) as caught:
        loss.backward()
    return str(caught.value)


def other_settings(rank, world_size, what):
    values = {"weight": torch.ones(40, 40), "bias": torch.ones(40)}
    return error_of(values, SETTINGS[what][rank])


@pytest.mark.parametrize("what", SETTINGS)
def test_other_settings_are_named_on_both_ranks(ranks, what):
    texts = ranks.run(2, other_settings, what, group_timeout_s=10)
    for rank, text in enumerate(texts):
        assert f"rank {1 - rank} differs in {SETTINGS[what][2]}" in text
    if what in TOLD:
        assert all(part in text for text in texts for part in TOLD[what])


def other_model(rank, world_size, what):
    return error_of(MODELS[what][rank], {})


@pytest.mark.parametrize("what", MODELS)
def test_other_models_are_named_on_both_ranks(ranks, what):
    texts = ranks.run(2, other_model, what, group_timeout_s=10)
    for rank, text in enumerate(texts):
        assert f"rank {1 - rank} differs in {what}" in text


def another_step(rank, world_size):
    """One rank resumed a checkpoint, the other did not."""
    values = {"weight": torch.ones(40, 40)}
    ddp = DistributedDataParallel(Given(values))
    state = ck.register(ddp, SPEC)
    if rank == 0:
        state.step = 5
    loss = ddp(values)
    with pytest.raises(ck.MismatchError) as caught:
        loss.backward()
    return str(caught.value)


def test_another_step_is_named_on_both_ranks(ranks):
    for rank, text in enumerate(ranks.run(2, another_step, group_timeout_s=10)):
        assert f"rank {1 - rank} differs in step" in text
        assert "0" in text
        assert "5" in text


def hook_on_the_second_rank(rank, world_size):
    values = {"weight": torch.ones(40, 40)}
    ddp = DistributedDataParallel(Given(values))
    if rank == 1:
        ck.register(ddp, SPEC)
    loss = ddp(values)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return type(caught.value).__name__, str(caught.value)


def test_a_hook_on_one_rank_ends_with_exceptions_on_both(ranks):
    """That on the first rank alone is in test_failures.py."""
    settings = {"group_timeout_s": 6, "timeout_s": 60}
    _, (name, text) = ranks.run(2, hook_on_the_second_rank, **settings)
    assert name == "PeerLost"
    assert "rank 0" in text
