"""Uneven inputs: DDP calls the hook with zeros for ranks that have joined."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.hook.models import batch, digest, make
from tests.hook.recording import (
    MODES,
    Recorder,
    check_ledger,
    check_lossless,
    descend,
)
from torch.distributed.algorithms.join import Join
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


def accumulated(ddp, rank, step, micro_batches):
    """A backward pass that synchronises, after others that do not."""
    ddp.zero_grad()
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with nullcontext() if last else ddp.no_sync():
            ddp(batch(rank, 10 * step + micro)).square().mean().backward()


def uneven(rank, world_size, spec, mode, counts, micro_batches=1):
    """Uneven batches in join(), then two even steps; without a hook if no spec."""
    ddp = make(**MODES[mode])
    recorder = Recorder(ddp, spec) if spec else None
    outputs = []

    def step_of(step):
        # The first step of a static graph cannot accumulate (test_accumulation.py).
        alone = step == 0 and "static_graph" in mode
        accumulated(ddp, rank, step, 1 if alone else micro_batches)
        if recorder:
            recorder.note()
        outputs.append({n: p.grad.clone() for n, p in ddp.module.named_parameters()})
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad

    with ddp.join():
        for step in range(counts[rank]):
            step_of(step)
    joined = digest(ddp)
    for step in range(max(counts), max(counts) + 2):
        step_of(step)
    result = {"digests": (joined, digest(ddp)), "outputs": outputs}
    if recorder:
        more = {"summary": recorder.summary(), "step": recorder.state.step}
        result |= more | {"local": recorder.steps}
    return result


# DDP itself needs one step of every rank in a static graph: its ranks abort else.
CELLS = [
    (mode, counts)
    for mode in MODES
    for counts in ((2, 4), (4, 1), (0, 3))
    if "static_graph" not in mode or 0 not in counts
]


@pytest.mark.parametrize(("mode", "counts"), CELLS, ids=str)
def test_uneven_inputs_and_training_on(ranks, mode, counts):
    for spec in ("identity", "quantize:bits=4", "sign"):
        check_uneven(ranks.run(2, uneven, spec, mode, counts), spec, counts)


def check_uneven(results, spec, counts):
    assert {r["step"] for r in results} == {max(counts) + 2}
    assert results[0]["digests"] == results[1]["digests"]
    mine = results[counts.index(max(counts))]  # what came of every step
    summaries = [
        (r["summary"][0], mine["summary"][1], r["summary"][2]) for r in results
    ]
    check_ledger(summaries, (spec, counts))
    if spec == "identity":
        for step, outputs in enumerate(mine["outputs"]):
            check_lossless(outputs, [r["local"][step] for r in results])


@pytest.mark.parametrize("mode", MODES)
def test_uneven_inputs_with_accumulation(ranks, mode):
    arguments = (mode, (2, 4), 3)
    plain = ranks.run(2, uneven, None, *arguments)
    for spec in ("identity", "quantize:bits=4"):
        results = ranks.run(2, uneven, spec, *arguments)
        check_uneven(results, spec, (2, 4))
        for hooked, bare in zip(results, plain, strict=True):
            same = hooked["digests"] == bare["digests"]
            assert same == (spec == "identity")
            for found, wanted in zip(hooked["outputs"], bare["outputs"], strict=True):
                assert same == all(torch.equal(found[n], wanted[n]) for n in wanted)


def two_modules(rank, world_size, counts, specs):
    """Two hooked modules in one join; digests and summaries, a list each."""
    both = [make(seed=seed) for seed in (0, 1)]
    recorders = [Recorder(*pair) for pair in zip(both, specs, strict=True)]
    with Join(both):
        for step in range(counts[rank]):
            for ddp, recorder in zip(both, recorders, strict=True):
                accumulated(ddp, rank, step, 1)
                recorder.note()
                descend(ddp)
    steps = [recorder.state.step for recorder in recorders]
    return [digest(d) for d in both], steps, [r.summary() for r in recorders]


def one_module(rank, world_size, counts, spec, seed):
    ddp = make(seed=seed)
    ck.register(ddp, spec, exempt=None)
    with ddp.join():
        for step in range(counts[rank]):
            accumulated(ddp, rank, step, 1)
            descend(ddp)
    return digest(ddp)


@pytest.mark.parametrize("counts", [(2, 4), (3, 1)], ids=str)
def test_two_hooked_modules_in_one_join(ranks, counts):
    """Each as if it were alone."""
    specs, longest = ("quantize:bits=4", "identity"), counts.index(max(counts))
    results = ranks.run(2, two_modules, counts, specs)
    alone = [
        ranks.run(2, one_module, counts, spec, seed) for seed, spec in enumerate(specs)
    ]
    for rank, (digests, steps, _) in enumerate(results):
        assert digests == [each[rank] for each in alone]
        assert steps == [max(counts)] * 2
    assert results[0][0] == results[1][0]
    for module, spec in enumerate(specs):
        outputs = results[longest][2][module][1]
        sums = [r[2][module] for r in results]
        check_ledger([(local, outputs, left) for local, _, left in sums], spec)


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
