"""Every mode of DDP against every kind of coder, over the rebuild of the buckets."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, digest
from tests.hook.recording import (
    CODERS,
    MODES,
    Chain,
    Checkpointed,
    Recorder,
    check_ledger,
    check_lossless,
    check_quantiser_bound,
)
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def chain(mode, **other):
    torch.manual_seed(0)
    return DistributedDataParallel(Chain(), bucket_cap_mb=0.25, **mode, **other)


def descend(ddp, rank, step):
    """One step of plain SGD; the gradients before and after the update."""
    ddp.zero_grad()
    ddp(batch(rank, step, 256)).square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in ddp.module.named_parameters()}
    with torch.no_grad():
        for p in ddp.parameters():
            p -= 3.0 * p.grad
    return gradients


def cells(rank, world_size, mode, steps):
    """Every coder in one mode: first and last outputs, what was recorded, hashes."""
    results = {}
    for spec in CODERS:
        ddp = chain(MODES[mode])
        recorder = Recorder(ddp, spec)
        outputs, digests = [], []
        for step in range(steps):
            outputs.append(descend(ddp, rank, step))
            recorder.note()
            digests.append(digest(ddp))
        results[spec] = {
            "outputs": outputs[0],
            "local": recorder.steps[0],
            "summary": recorder.summary(),
            "digests": digests,
            "buckets": [len(buckets) for buckets in recorder.buckets[:steps]],
            "steps": recorder.state.step,
        }
    plain = chain(MODES[mode])
    for step in range(steps):
        descend(plain, rank, step)
    return results, digest(plain)


@pytest.mark.parametrize("mode", MODES)
def test_every_coder_in_every_mode(ranks, mode):
    steps = 5
    both = ranks.run(2, cells, mode, steps)
    for spec in CODERS:
        mine, other = (results[spec] for results, _ in both)
        assert mine["digests"] == other["digests"], spec
        assert len(set(mine["digests"])) == steps
        assert mine["steps"] == steps
        check_ledger([mine["summary"], other["summary"]], (mode, spec))
        local = [mine["local"], other["local"]]
        if spec == "identity":
            check_lossless(mine["outputs"], local)
            assert mine["digests"][-1] == both[0][1] == both[1][1]
        elif spec.startswith("quantize"):
            check_quantiser_bound(mine["outputs"], local, int(spec[-1]))
        rebuilt = mode != "find_unused_parameters"
        assert mine["buckets"][0] == (1 if rebuilt else 4)
        assert mine["buckets"][-1] == 4


def warm_up(rank, world_size, start_step, spec):
    ddp = chain({"static_graph": True})
    recorder = Recorder(ddp, spec, start_step=start_step)
    factors, exact = [], []
    for step in range(6):
        outputs = descend(ddp, rank, step)
        recorder.note()
        factors.append(recorder.state.stats()["compression_factor"])
        exact.append(outputs)
    residuals = recorder.state.residuals
    buckets = [len(step) for step in recorder.buckets[:6]]
    names = set(residuals.names())
    return recorder.summary(), factors, names, recorder.steps, exact, buckets


@pytest.mark.parametrize("start_step", [0, 1, 2])
def test_compression_may_start_before_at_or_after_the_rebuild(ranks, start_step):
    for spec in ("quantize:bits=4", "sign"):
        results = ranks.run(2, warm_up, start_step, spec)
        check_ledger([r[0] for r in results], (start_step, spec))
        for _, factors, names, _, outputs, buckets in results:
            assert buckets == [1, 1, 4, 4, 4, 4]
            assert [f > 2 for f in factors] == [s >= start_step for s in range(6)]
            assert names == {f"layers.{i}.weight" for i in range(4)}
            for step in range(start_step):
                check_lossless(outputs[step], [r[3][step] for r in results])


def registered_late(rank, world_size):
    ddp, plain = chain({}), chain({})
    for step in range(3):
        descend(ddp, rank, step)
    state = ck.register(ddp, "identity")
    for step in range(3, 6):
        descend(ddp, rank, step)
    for step in range(6):
        descend(plain, rank, step)
    return digest(ddp), digest(plain), state.step


def test_a_hook_may_be_registered_in_the_middle_of_training(ranks):
    for hooked, plain, step in ranks.run(2, registered_late):
        assert hooked == plain
        assert step == 3


def checkpointing(rank, world_size, reentrant, mode):
    results = []
    for spec in (None, "identity", "quantize:bits=4"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            Checkpointed(reentrant), bucket_cap_mb=0.01, **MODES[mode]
        )
        recorder = Recorder(ddp, spec) if spec else None
        for step in range(4):
            ddp.zero_grad()
            x = batch(rank, step).requires_grad_()
            ddp(x).square().mean().backward()
            if recorder:
                recorder.note()
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
        results.append((digest(ddp), recorder and recorder.summary()))
    return results, len(recorder.buckets[3])


@pytest.mark.parametrize(
    ("reentrant", "mode"),
    [
        (False, "default"),
        (False, "find_unused_parameters"),
        (False, "static_graph"),
        (True, "default"),
        (True, "static_graph"),
    ],
)
def test_activation_checkpointing(ranks, reentrant, mode):
    results = ranks.run(2, checkpointing, reentrant, mode)
    (plain, identity, quantised), buckets = results[0]
    assert plain[0] == identity[0]
    assert buckets > 2
    assert quantised[0] == results[1][0][2][0]
    check_ledger([r[0][2][1] for r in results])
