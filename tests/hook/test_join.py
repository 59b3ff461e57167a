"""Uneven inputs: DDP calls the hook with zeros for ranks that have joined."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, digest, make
from tests.hook.recording import MODES, Recorder, check_ledger, check_lossless
from torch.nn.parallel import DistributedDataParallel

import commkern as ck


def divisor(rank, world_size, by_initial):
    """Gradients i + 1 + rank; rank 0 has 2 batches, rank 1 has 4."""
    results = []
    for hooked in (False, True):
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        state = ck.register(ddp, "identity") if hooked else None
        gradients = []
        with ddp.join(divide_by_initial_world_size=by_initial):
            for i in range(2 if rank == 0 else 4):
                ddp.zero_grad()
                ddp(torch.ones(1, 4) * (i + 1 + rank)).sum().backward()
                gradients.append(ddp.module.weight.grad[0, 0].item())
        results.append(gradients)
    return results, state.step


@pytest.mark.parametrize("by_initial", [True, False])
def test_the_divisor_is_the_size_of_the_group(ranks, by_initial):
    first, second = ranks.run(2, divisor, by_initial)
    plain = [2.0, 2.5] if by_initial else [4.0, 5.0]
    assert first == ([[1.5, 2.5], [1.5, 2.5]], 4)
    assert second == ([[1.5, 2.5, *plain], [1.5, 2.5, 2.0, 2.5]], 4)


def uneven(rank, world_size, spec, mode, counts, accumulate=1):
    """Uneven batches in join(), then two even steps."""
    ddp = make(**MODES[mode])
    recorder = Recorder(ddp, spec)
    outputs, batches = [], counts[rank]

    def step_of(step):
        ddp.zero_grad()
        for micro in range(accumulate):
            loss = ddp(batch(rank, 10 * step + micro)).square().mean()
            if micro < accumulate - 1:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
        recorder.note()
        outputs.append({n: p.grad.clone() for n, p in ddp.module.named_parameters()})
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad

    with ddp.join():
        for step in range(batches):
            step_of(step)
    joined = digest(ddp)
    for step in range(max(counts), max(counts) + 2):
        step_of(step)
    return {
        "summary": recorder.summary(),
        "digests": (joined, digest(ddp)),
        "step": recorder.state.step,
        "local": recorder.steps,
        "outputs": outputs,
    }


# DDP itself needs one step of every rank in a static graph: its ranks abort else.
CELLS = [
    (mode, counts)
    for mode in MODES
    for counts in ((2, 4), (4, 1), (0, 3))
    if "static_graph" not in mode or 0 not in counts
]


@pytest.mark.parametrize(("mode", "counts"), CELLS, ids=str)
def test_uneven_inputs_and_training_on(ranks, mode, counts):
    longest = counts.index(max(counts))
    for spec in ("identity", "quantize:bits=4", "sign"):
        results = ranks.run(2, uneven, spec, mode, counts)
        assert {r["step"] for r in results} == {max(counts) + 2}
        assert results[0]["digests"] == results[1]["digests"]
        mine = results[longest]
        summaries = [
            (r["summary"][0], mine["summary"][1], r["summary"][2]) for r in results
        ]
        check_ledger(summaries, (spec, counts))
        if spec == "identity":
            for step, outputs in enumerate(mine["outputs"]):
                check_lossless(outputs, [r["local"][step] for r in results])


def test_three_ranks_that_join_one_after_another(ranks):
    results = ranks.run(3, uneven, "quantize:bits=4", "default", (3, 1, 5))
    assert {r["step"] for r in results} == {7}
    assert len({r["digests"] for r in results}) == 1
    outputs = results[2]["summary"][1]
    check_ledger([(r["summary"][0], outputs, r["summary"][2]) for r in results])


def train_joined(ddp, rank, counts, bad_step=None, **join):
    with ddp.join(**join):
        for step in range(counts[rank]):
            loss = ddp(batch(rank, step)).square().mean()
            (loss * (float("nan") if step == bad_step else 1)).backward()


def nonfinite_while_joined(rank, world_size):
    """Rank 0 has joined when rank 1 meets a NaN: nonfinite="raise" on both."""
    ddp = make()
    ck.register(ddp, "quantize:bits=4", nonfinite="raise")
    with pytest.raises(ck.NonFiniteError, match="in step 2"):
        train_joined(ddp, rank, (1, 3), bad_step=2)


def test_a_joined_rank_gets_the_error_as_itself(ranks):
    ranks.run(2, nonfinite_while_joined)


def early_termination(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=4")
    with pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"):
        train_joined(ddp, rank, (2, 3), throw_on_early_termination=True)
    return state.step, [g.grad.double().sum().item() for g in ddp.parameters()]


def test_early_termination(ranks):
    first, second = ranks.run(2, early_termination)
    assert first[0] == second[0] == 2
    assert first == second
