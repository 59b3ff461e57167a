"""Sparse gradients: the results of DDP, and of dense gradients, in bits."""

from __future__ import annotations

import pytest
import torch
from tests.hook.embeddings import (
    hooked,
    make,
    pairs,
    same_bits,
    train,
)
from tests.hook.models import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck

KINDS = {
    "embedding": {},
    "bag of sums": {"kind": nn.EmbeddingBag, "mode": "sum"},
    "bag of means": {"kind": nn.EmbeddingBag},
}
MODES = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")

# --- results --------------------------------------------------------------------------


def beside_plain(rank, world_size, kind, ddp):
    plain, mine = (make(ddp=ddp, **kind) for _ in range(2))
    state = hooked(mine)
    expected, got = (train(d, rank, range(4), pairs) for d in (plain, mine))
    assert state.step == 4
    for a, b in zip(expected, got, strict=True):
        assert b["words.weight"].is_coalesced()
        for name in ("words.weight", "tags.weight"):
            assert torch.equal(
                a[name].coalesce().indices(), b[name].coalesce().indices()
            )
            assert torch.equal(a[name].coalesce().values(), b[name].coalesce().values())
    return same_bits(expected, got), digest(plain), digest(mine)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_ddp(ranks, kind):
    for same, plain, mine in ranks.run(2, beside_plain, KINDS[kind], {}):
        assert same
        assert plain == mine


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_ddp(ranks, mode):
    for same, plain, mine in ranks.run(2, beside_plain, {}, {mode: True}):
        assert same
        assert plain == mine


def beside_dense(rank, world_size, dtype, kind):
    models = [make(dtype, sparse=sparse, **kind) for sparse in (False, True)]
    states = [hooked(ddp) for ddp in models]
    expected, got = (train(ddp, rank, range(3)) for ddp in models)
    assert [state.step for state in states] == [3, 3]
    ck.check_sync(models[1], gradients=True)
    return same_bits(expected, got), *map(digest, models)


def check_dense(found):
    assert len({mine for _, _, mine in found}) == 1
    for same, dense, mine in found:
        assert same
        assert dense == mine


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_are_those_of_dense_gradients(ranks, world_size):
    check_dense(ranks.run(world_size, beside_dense, torch.float32, {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype(ranks, dtype):
    """Plain DDP over gloo has no sparse 16-bit gradients."""
    check_dense(ranks.run(2, beside_dense, dtype, {}))


class Shared(nn.Module):
    """Two gradients whose values are the same memory."""

    def __init__(self, sparse):
        super().__init__()
        self.ones = nn.Embedding(9, 4, sparse=sparse)
        self.others = nn.Embedding(9, 4, sparse=sparse)

    def forward(self, x):
        return self.ones(x) + self.others(x)


def shared(rank, world_size):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Shared(sparse))
        hooked(ddp)
        found.append(train(ddp, rank, range(2), lambda r, s: torch.arange(3 + r) + s))
    return same_bits(*found)


def test_gradients_that_share_memory_are_left_alone(ranks):
    assert all(ranks.run(2, shared))


# --- few rows, and none ---------------------------------------------------------------


def some_rows(rank, step):
    """Rank 0 has padding only in the first step, all of them have in the second."""
    some = torch.tensor([[1, 2, 2]])
    return some if step != 1 and (rank or step) else torch.zeros_like(some)


def few(rank, world_size):
    found = []
    for sparse in (False, True):
        ddp = make(sparse=sparse, padding_idx=0)
        state = hooked(ddp)
        found.append(train(ddp, rank, range(3), some_rows))
        assert state.step == 3
    kept = [gradient["words.weight"].indices().tolist() for gradient in found[1]]
    return same_bits(*found), kept


def test_ranks_without_rows(ranks):
    for same, kept in ranks.run(2, few):
        assert same
        assert kept == [[[1, 2]], [[]], [[1, 2]]]


def joined(rank, world_size):
    found = []
    for hook in (False, True):
        ddp = make()
        if hook:
            state = hooked(ddp)
        with ddp.join():
            train(ddp, rank, range(2 + 2 * rank), pairs)
        train(ddp, rank, range(4, 6), pairs)
        found.append(digest(ddp))
    assert state.step == 6
    return found


def test_uneven_inputs(ranks):
    for plain, mine in ranks.run(2, joined):
        assert plain == mine


def optimized(rank, world_size, hook):
    ddp = make()
    if hook:
        hooked(ddp)
    embeddings = [ddp.module.words.weight, ddp.module.tags.weight]
    lazy = torch.optim.SparseAdam(embeddings)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        ddp.zero_grad()
        ddp(pairs(rank, step)).square().mean().backward()
        (lazy if step % 2 else plain).step()
    return digest(ddp)


def test_optimizers_of_sparse_gradients(ranks):
    """SparseAdam moves a row of zeros too, so that rows count and not values alone."""
    assert ranks.run(2, optimized, True) == ranks.run(2, optimized, False)
