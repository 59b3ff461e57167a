"""Steps with sparse buckets: where they begin and end, fail, and are refused."""

from __future__ import annotations

import copy
import io
from unittest import mock

import pytest
import torch
from tests.hook.embeddings import (
    ROWS,
    Words,
    batch,
    gradients,
    hooked,
    make,
    same_bits,
    train,
)
from tests.hook.models import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck
from commkern.errors import CommkernError, NonFiniteError
from commkern.groups import GroupWorker
from commkern.policy import Policy

FEEDBACK = {"compressor": "quantize:bits=4", "feedback": "error", "seed": 5}

# --- the step -------------------------------------------------------------------------


def order(rank, world_size):
    places = []

    def hook(
        state: ck.CompressionState,
        bucket: torch.distributed.GradBucket,
    ) -> torch.futures.Future[torch.Tensor]:
        places.append((bucket.is_last(), bucket.buffer().is_sparse))
        return ck.compression_hook(state, bucket)

    hook.__annotations__ = {
        "bucket": torch.distributed.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    ddp = make()
    state = ck.CompressionState(module=ddp, compressor="quantize:bits=8")
    ddp.register_comm_hook(state, hook)
    train(ddp, rank, range(3))
    step = places[-len(places) // 3 :]
    return step, state.step, state.stats()


def test_a_step_begins_and_ends_with_a_sparse_bucket(ranks):
    for places, step, stats in ranks.run(2, order):
        assert places[0] == (False, True)
        assert places[-1] == (True, True)
        assert {sparse for _, sparse in places[1:-1]} == {False}
        assert step == 3
        assert stats["total"]["steps"] == 3


def other_words(rank, step):
    return torch.arange(4 * step, 4 * step + 6) + rank


class TwoTypes(Words):
    """Dense buckets of two dtypes, too."""

    def __init__(self, **kw):
        super().__init__(**kw)
        self.last = nn.Linear(6, 6).double()

    def forward(self, x):
        return self.last(super().forward(x).double())


def static(rank, world_size):
    found = []
    for kw in ({}, {"static_graph": True}):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(TwoTypes(), **kw)
        state = hooked(ddp, ledger=True, **FEEDBACK)
        train(ddp, rank, range(1))
        assert state.step == 1
        assert state.stats()["total"]["steps"] == 1
        train(ddp, rank, range(1, 4))
        state.check_ledger()
        assert state.step == 4
        found.append((digest(ddp), state.state_dict()["residuals"]))
    (one, kept), (other, also_kept) = found
    assert all(torch.equal(kept[name], also_kept[name]) for name in kept)
    return one, other


def test_the_first_step_of_a_static_graph(ranks):
    """DDP calls all of its buckets number 0 there, and none the last."""
    for one, other in ranks.run(2, static):
        assert one == other


def accumulated(rank, world_size):
    found = []
    for sparse in (False, True):
        ddp = make(sparse=sparse)
        state = hooked(ddp)
        for step in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(other_words(rank, step)).sum().backward()
            ddp(other_words(rank, step + 1)).sum().backward()
            found.append(gradients(ddp))
        assert state.step == 2
    return same_bits(found[:2], found[2:])


def test_micro_batches_add_up(ranks):
    assert all(ranks.run(2, accumulated))


def with_feedback(rank, world_size):
    ddp, whole = make(), make()
    state, other = (hooked(d, ledger=True, **FEEDBACK) for d in (ddp, whole))
    train(whole, rank, range(6))
    train(ddp, rank, range(3))
    file = io.BytesIO()
    torch.save({"hook": state.state_dict(), "model": ddp.module.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = make(seed=9)
    again.module.load_state_dict(saved["model"])
    restored = hooked(again, ledger=True, **FEEDBACK)
    restored.load_state_dict(saved["hook"])
    train(again, rank, range(3, 6))
    ck.check_sync(again)
    for kept in (other, restored):
        off = kept.check_ledger()
        assert kept.state_dict()["ledger_given"]["words.weight"].any()
        assert off["words.weight"] < 1e-6
        assert off["inner.weight"] < 1e-5
    copied = copy.deepcopy(restored)
    copied.bind(make())
    assert copied.step == 6
    return digest(whole), digest(again), list(saved["hook"]["residuals"])


def test_feedback_of_dense_layers_beside_them(ranks):
    for whole, again, residuals in ranks.run(2, with_feedback):
        assert whole == again
        assert sorted(residuals) == [
            f"{layer}.{what}"
            for layer in ("inner", "out")
            for what in ("bias", "weight")
        ]


# --- not finite -----------------------------------------------------------------------


def spoilt(rank, world_size, nonfinite):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Embedding(ROWS, 6, sparse=sparse))
        state = hooked(ddp, nonfinite=nonfinite)
        values = ddp(torch.tensor([[3 + rank, 9]]))
        factor = torch.tensor([float("nan"), 1.0]) if rank else torch.ones(2)
        loss = (values * factor.view(1, 2, 1)).sum()
        if nonfinite == "raise":
            with pytest.raises(NonFiniteError, match="step 0"):
                loss.backward()
        else:
            loss.backward()
        gradient = gradients(ddp)["weight"].to_dense()
        found.append((gradient.nan_to_num(7.0), gradient.isnan().any(1)))
        stats = state.stats()
        assert (stats["step"], stats["committed"]) == (0, nonfinite == "saturate")
    (dense, _), (sparse, nans) = found
    return torch.equal(dense, sparse), nans.nonzero().flatten().tolist()


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "saturate"])
def test_nan_on_one_rank(ranks, nonfinite):
    for same, nans in ranks.run(2, spoilt, nonfinite):
        assert same
        assert nans == ([] if nonfinite == "saturate" else [4])


def failing(rank, world_size):
    ddp = make()
    hooked(ddp)
    local = make(ddp={"bucket_cap_mb": 25})
    with local.no_sync():
        local(batch(rank, 0)).sum().backward()
    with (
        mock.patch.object(GroupWorker, "run", side_effect=CommkernError("no")),
        pytest.raises(CommkernError, match="no"),
    ):
        ddp(batch(rank, 0)).sum().backward()
    expected, got = (gradients(d)["words.weight"] for d in (local, ddp))
    return torch.equal(expected._indices(), got._indices()) and torch.equal(
        expected._values(), got._values()
    )


def test_a_failure_leaves_the_gradient_as_it_was(ranks):
    assert ranks.run(1, failing) == [True]


# --- what is not reduced, and what is refused -----------------------------------------


def left_alone(rank, world_size):
    found = []
    for what in ("frozen", "ignored"):
        torch.manual_seed(0)
        model = Words()
        if what == "frozen":
            model.words.weight.requires_grad_(False)
        else:
            model._ddp_params_and_buffers_to_ignore = ["words.weight"]
        ddp = DistributedDataParallel(model)
        state = hooked(ddp, **FEEDBACK)
        ddp(batch(rank, 0)).sum().backward()
        assert (model.words.weight.grad is None) == (what == "frozen")
        found.append((list(state.stats()["sparse"]), state.step))
    return found


def test_what_ddp_leaves_alone(ranks):
    assert ranks.run(2, left_alone) == [[(["tags.weight"], 1)] * 2] * 2


def refused(rank, world_size):
    texts = []
    with pytest.raises(ValueError, match="delayed must be False") as caught:
        ck.register(make(), delayed=True)
    texts.append(str(caught.value))
    ddp = make()
    ddp.module.words.sparse = False
    ck.register(ddp)
    ddp.module.words.sparse = True
    with pytest.raises(TypeError, match="layout") as caught:
        train(ddp, rank, range(1))
    texts.append(str(caught.value))
    return texts


def test_what_cannot_be_served_is_named(ranks):
    for delayed, unknown in ranks.run(2, refused):
        assert "got True" in delayed
        assert "weight'" in delayed
        assert "'words.weight' has layout torch.sparse_coo" in unknown
        assert "expects torch.strided" in unknown


def unused(rank, world_size, hook):
    class Half(Words):
        def forward(self, x):
            return self.inner(self.words(x))

    ddp = DistributedDataParallel(Half(), find_unused_parameters=True)
    if hook:
        hooked(ddp)
    with pytest.raises(RuntimeError) as caught:
        ddp(batch(rank, 0)).sum().backward()
    return str(caught.value)


def test_an_unused_one_is_refused_by_ddp(ranks):
    for hook in (False, True):
        for text in ranks.run(2, unused, hook):
            assert "Expected sparse gradient to be defined" in text


def test_a_mapping_may_name_one():
    names = {"words.weight": torch.zeros(ROWS, 64), "out.weight": torch.zeros(64, 64)}
    policy = Policy(
        names, {"*": "quantize:bits=4"}, exempt=None, plain=["words.weight"]
    )
    assert str(policy.compressor("words.weight", 0)) == "identity"
    assert not policy.codes("words.weight")
    assert policy.codes("out.weight")
