"""Parameters that are tied, or not used by some or by all ranks."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, digest
from tests.hook.recording import Recorder, check_ledger, descend, heads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Which ranks use head b in each step: all, none, one, the other, none, all.
USERS = [(0, 1), (), (0,), (1,), (), (0, 1)]


def unused(rank, world_size, spec, mode):
    ddp = heads(find_unused_parameters=True, **mode)
    recorder = Recorder(ddp, spec) if spec else None
    gradients, residuals = [], []
    for step, users in enumerate(USERS):
        used = "ab" if rank in users else "a"
        ddp(batch(rank, step, 40), used).square().mean().backward()
        gradient = ddp.module.b.weight.grad
        untouched = gradient is None or not gradient.any()
        gradients.append(None if untouched else gradient.clone())
        if recorder:
            recorder.note()
            residuals.append(recorder.state.state_dict()["residuals"].get("b.weight"))
        descend(ddp)
    return gradients, residuals, recorder and recorder.summary(), digest(ddp)


@pytest.mark.parametrize("mode", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_parameters_unused_by_some_or_by_all(ranks, mode):
    plain = ranks.run(2, unused, None, mode)
    hooked = ranks.run(2, unused, "identity", mode)
    assert len({r[3] for r in plain + hooked}) == 1
    for spec in ("quantize:bits=4", "sign"):
        results = ranks.run(2, unused, spec, mode)
        assert results[0][3] == results[1][3]
        check_ledger([r[2] for r in results], spec)
        for gradients, residuals, _, _ in results:
            assert [g is None for g in gradients] == [not users for users in USERS]
            for step, users in enumerate(USERS):
                if not users:
                    assert torch.equal(residuals[step], residuals[step - 1])
            assert not torch.equal(residuals[2], residuals[3])


def unused_without_being_told(rank, world_size, static):
    """Head b is never used: allowed in a static graph, else DDP's next forward pass
    raises; the hook has no part in it."""
    ddp = heads(static_graph=static)
    recorder = Recorder(ddp, "quantize:bits=4")
    for step in range(4 if static else 1):
        ddp(batch(rank, step, 40), "a").square().mean().backward()
        recorder.note()
        descend(ddp)
    if not static:
        with pytest.raises(RuntimeError, match="find_unused_parameters"):
            ddp(batch(rank, 1, 40), "a")
        return None
    return recorder.summary(), recorder.state.step, list(recorder.outputs)


def test_a_static_graph_may_have_unused_parameters(ranks):
    results = ranks.run(2, unused_without_being_told, True)
    check_ledger([r[0] for r in results])
    for _, step, names in results:
        assert step == 4
        assert "a.weight" in names
        assert "b.weight" not in names


def test_ddp_refuses_unused_parameters_that_it_was_not_told_of(ranks):
    ranks.run(2, unused_without_being_told, False)


class Tied(nn.Module):
    """One weight under two names, and a bucket order that changes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 48, bias=False)
        self.middle = nn.Linear(48, 48, bias=False)
        self.head = nn.Linear(48, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.embed(x)))))


def tied(rank, world_size, mode):
    digests, summary = [], None
    for spec in (None, "identity", "quantize:bits=4"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Tied(), bucket_cap_mb=0.005, **mode)
        recorder = Recorder(ddp, spec) if spec else None
        for step in range(5):
            ddp(batch(rank, step, 48)).square().mean().backward()
            if recorder:
                recorder.note()
            descend(ddp)
        digests.append(digest(ddp))
        summary = recorder and recorder.summary()
    return digests, summary, sorted(recorder.state.report())


@pytest.mark.parametrize(
    "mode", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str
)
def test_tied_weights_are_one_parameter(ranks, mode):
    first, second = ranks.run(2, tied, mode)
    assert first[0] == second[0]
    assert first[0][0] == first[0][1]
    assert first[2] == ["embed.weight", "middle.weight"]
    check_ledger([first[1], second[1]])
