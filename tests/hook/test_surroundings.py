"""What user code and other parts of torch do around the hook."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.hook.models import batch, digest, make
from tests.hook.recording import (
    MODES,
    Chain,
    Checkpointed,
    Recorder,
    check_ledger,
    check_lossless,
    recorded_hook,
)
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

VIEWS = [False, True]


def returning_hook(state, bucket):
    """Lets the test overwrite what the hook returned."""
    state.returned = bucket.buffer()
    return recorded_hook(state, bucket)


def returned_is_overwritten(rank, world_size, view):
    """Five iterations; what the hook returned is overwritten after each."""
    results = []
    for spec in ("identity", "quantize:bits=4"):
        for spoil in (False, True):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(
                torch.nn.Linear(16, 16), gradient_as_bucket_view=view
            )
            recorder = Recorder(ddp, spec, hook=returning_hook)
            gradients = []
            for step in range(5):
                ddp.zero_grad(set_to_none=not view)
                ddp(batch(rank, step, 16)).square().mean().backward()
                gradients.append(
                    {n: p.grad.clone() for n, p in ddp.module.named_parameters()}
                )
                if spoil:
                    recorder.returned.fill_(1e30)
            results.append((gradients, recorder.steps))
    return results


@pytest.mark.parametrize("view", VIEWS)
def test_no_alias_of_the_returned_tensor_is_kept(ranks, view):
    first, second = ranks.run(2, returned_is_overwritten, view)
    for step in range(5):
        local = [each[1][1][step] for each in (first, second)]
        check_lossless(first[1][0][step], local)
    for clean, spoilt in ((first[0], first[1]), (first[2], first[3])):
        for before, after in zip(clean[0], spoilt[0], strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


def double(p):
    p.grad.mul_(2)


def edits_gradients(rank, world_size, view, spec):
    """A user's post-accumulate-grad hooks double p.grad; with DDP's own reduction and
    with ours."""
    digests, summary = [], None
    for coder in (None, spec):
        ddp = make(gradient_as_bucket_view=view)
        for p in ddp.parameters():
            p.register_post_accumulate_grad_hook(double)
        recorder = Recorder(ddp, coder) if coder else None
        for step in range(4):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            if recorder:
                recorder.note()
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
        digests.append(digest(ddp))
        summary = recorder and recorder.summary()
    return digests, summary


@pytest.mark.parametrize("view", VIEWS)
def test_gradients_that_a_users_hook_edits(ranks, view):
    for digests, _ in ranks.run(2, edits_gradients, view, "identity"):
        assert len(set(digests)) == 1
    results = ranks.run(2, edits_gradients, view, "quantize:bits=4")
    check_ledger([summary for _, summary in results])
    assert results[0][0][1] == results[1][0][1]


def clipping(rank, world_size, view):
    digests, norms, summary = [], [], None
    for spec in (None, "identity", "quantize:bits=4"):
        ddp = make(gradient_as_bucket_view=view)
        recorder = Recorder(ddp, spec) if spec else None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            if recorder:
                recorder.note()
            norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01).item())
            optimizer.step()
        digests.append(digest(ddp))
        summary = recorder and recorder.summary()
    return digests, norms, summary


@pytest.mark.parametrize("view", VIEWS)
def test_clipping_after_the_hook(ranks, view):
    first, second = ranks.run(2, clipping, view)
    assert first[0] == second[0]
    assert first[0][0] == first[0][1] != first[0][2]
    assert first[1] == second[1]
    assert min(first[1]) > 0.01
    check_ledger([first[2], second[2]])


class Normed(torch.nn.Module):
    """BatchNorm, whose buffers DDP broadcasts before each forward pass."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.last = Chain(64, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def buffers(rank, world_size, spec, broadcast):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        Normed(), forward_sync_buffers=broadcast, bucket_cap_mb=0.01
    )
    recorder = Recorder(ddp, spec) if spec else None
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        if recorder:
            recorder.note()
    norm = ddp.module.norm
    statistics = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return statistics, recorder and recorder.summary()


@pytest.mark.parametrize("broadcast", [True, False])
def test_batch_norm_and_its_buffers(ranks, broadcast):
    plain = ranks.run(2, buffers, None, broadcast)
    hooked = ranks.run(2, buffers, "quantize:bits=4", broadcast)
    for (before, _), (after, _) in zip(plain, hooked, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(plain[0][0][0], plain[1][0][0])
    check_ledger([summary for _, summary in hooked])


class SyncedNorm(torch.nn.Module):
    """What SyncBatchNorm does: all_reduce in the forward and in the backward pass."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        sums = all_reduce(torch.stack([x.sum(0), x.square().sum(0)]))
        mean, square = sums / (x.shape[0] * dist.get_world_size())
        self.seen.append((mean.detach().clone(), square.detach().clone()))
        return (x - mean) / (square - mean**2 + 1e-5).sqrt()


def other_collectives(rank, world_size, spec):
    before = dist.all_reduce
    torch.manual_seed(0)
    model = torch.nn.Sequential(Chain(64, 2), SyncedNorm(), Chain(64, 2), SyncedNorm())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    recorder = Recorder(ddp, spec) if spec else None
    metrics = []
    for step in range(6):
        ddp.zero_grad()
        loss = ddp(batch(rank, step)).abs().sum() / 1024
        metric = torch.tensor([1 / 3, 1e-9, 1e9]) * (rank + 1)
        work = dist.all_reduce(metric, async_op=True)  # beside the hook's messages
        loss.backward()
        work.wait()
        metrics.append(metric)
        if recorder:
            recorder.note()
    seen = model[1].seen + model[3].seen
    return seen, metrics, recorder and recorder.summary(), dist.all_reduce is before


def test_only_gradients_are_compressed(ranks):
    plain = ranks.run(2, other_collectives, None)
    for spec in ("quantize:bits=4", "sign"):
        results = ranks.run(2, other_collectives, spec)
        check_ledger([r[2] for r in results], spec)
        for (seen, metrics, _, _), (seen2, metrics2, _, same) in zip(
            plain, results, strict=True
        ):
            assert same
            assert all(
                torch.equal(a, b) for a, b in zip(metrics, metrics2, strict=True)
            )
            for a, b in zip(seen, seen2, strict=True):
                assert torch.equal(a[0], b[0])
                assert torch.equal(a[1], b[1])


def raised_by_backward(rank, world_size, mode):
    """NonFiniteError in the first step and in a later one, and training goes on."""
    torch.manual_seed(0)
    reentrant = mode == "reentrant checkpoints"
    model = Checkpointed(True) if reentrant else Chain(64, 4)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **MODES.get(mode, {}))
    recorder = Recorder(ddp, "quantize:bits=4", nonfinite="raise")
    caught = []
    for step in range(6):
        ddp.zero_grad()
        x = batch(rank, step).requires_grad_()
        loss = ddp(x).square().mean()
        bad = step in (0, 3)
        if bad and rank == 1:
            loss = loss * float("nan")
        try:
            loss.backward()
        except ck.NonFiniteError as error:
            caught.append((step, str(error)))
            recorder.steps[step] = {}
        else:
            recorder.note()
    return caught, recorder.summary(), recorder.state.step


@pytest.mark.parametrize("mode", [*MODES, "reentrant checkpoints"])
def test_backward_raises_in_every_mode(ranks, mode):
    results = ranks.run(2, raised_by_backward, mode)
    check_ledger([summary for _, summary, _ in results])
    for caught, _, step in results:
        assert [at for at, _ in caught] == [0, 3]
        assert "step 3" in caught[1][1]
        assert step == 6
