"""What sparse gradients cost, which route they take, and what figures say of it."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from tests.hook.embeddings import gradients, hooked, make, train
from tests.hook.test_logging import Collected
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck
from commkern.compose import Settings
from commkern.forecast import BucketCost, Forecast
from commkern.groups import worker
from commkern.row_tables import Table
from commkern.sparse import SparseBuckets, rounded_up
from commkern.testing import spawn_threads

ROWS, WIDTH, RANKS = 1000, 16, 4
SHARES = 2 * (RANKS - 1) / RANKS  # of what is reduced, sent by each rank
MESSAGES = 2 * (RANKS - 1)
HEADERS = 64 + 32 + 32 + 8  # preamble, header, a section, parameter bits

# --- bytes ----------------------------------------------------------------------------


def table(rank, world_size, batches):
    """The gradient, the dense one, and figures of the last of these batches."""
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Embedding(ROWS, WIDTH, sparse=sparse))
        state = hooked(ddp)
        for words in batches:
            ddp.zero_grad()
            (ddp(words[rank]) * torch.randn(WIDTH)).sum().backward()
        found += [gradients(ddp)["weight"].to_dense(), state.stats()]
    mine, stats, reference, dense_stats = found
    assert torch.equal(mine, reference)
    return stats, dense_stats


def sets_of(count, *, same):
    generator = torch.Generator().manual_seed(count)
    chosen = [torch.randperm(ROWS, generator=generator)[:count] for _ in range(RANKS)]
    return chosen[:1] * RANKS if same else chosen


def test_many_rows_cost_no_more_than_all_of_them(ranks):
    batch = sets_of(600, same=False)
    union = len(torch.cat(batch).unique())
    found = ranks.run(RANKS, table, [batch])
    assert mean(dense["bytes_dense"] for _, dense in found) == SHARES * 64000
    for stats, dense in found:
        expected = {"route": "dense", "rows": union, "of": ROWS}
        assert stats["sparse"] == {"weight": expected}
        assert stats["bytes_dense"] == dense["bytes_dense"]
        assert stats["bytes_sent"] <= 1.1 * dense["bytes_dense"]
        assert stats["bytes_sent"] <= 1.05 * dense["bytes_sent"]


def test_equal_rows_cost_no_more_than_a_table(ranks):
    for stats, dense in ranks.run(RANKS, table, [sets_of(600, same=True)]):
        assert stats["sparse"]["weight"]["route"] == "sparse"
        assert stats["bytes_sent"] <= 1.1 * 64000
        assert stats["bytes_dense"] == dense["bytes_dense"]


@pytest.mark.parametrize("same", [True, False])
def test_words_that_come_often_travel_once(ranks, same):
    batch = [words.repeat(100) for words in sets_of(5, same=same)]
    union = len(torch.cat(batch).unique())
    values = SHARES * 4 * WIDTH * rounded_up(union)
    agreement = SHARES * RANKS * (8 + 5 * 4)  # counts in fp64, numbers in fp32
    found = [stats for stats, _ in ranks.run(RANKS, table, [batch])]
    assert {stats["sparse"]["weight"]["rows"] for stats in found} == {union}
    sent = mean(stats["bytes_sent"] for stats in found)
    assert 0 <= sent - values - agreement - 3 * MESSAGES * HEADERS < 3 * MESSAGES * 8


def logged(rank, world_size, batches):
    with Collected() as log:
        stats, _ = table(rank, world_size, batches)
    return [text for text in log.at("INFO") if "route" in text], stats


def test_the_route_changes_by_itself_and_says_so(ranks):
    few, many = (sets_of(count, same=False) for count in (5, 600))
    empty, union = [words[:0] for words in few], len(torch.cat(few).unique())
    found = ranks.run(RANKS, logged, [few, many, empty, few, many, few])
    for rank, (texts, stats) in enumerate(found):
        assert len(texts) == 2
        assert texts[0].startswith(f"rank {rank}, step 0: the sparse gradient of 'we")
        assert f"{union} of 1000 rows and goes the sparse route: " in texts[0]
        assert "goes the dense route: " in texts[1]
        assert texts[1].endswith(
            f" bytes sent, {stats['bytes_dense']} for the whole table"
        )
        assert stats["sparse"] == {
            "weight": {"route": "sparse", "rows": union, "of": 1000}
        }
    assert len({str(stats["sparse"]) for _, stats in found}) == 1


def plans_kept(rank, world_size):
    ddp = DistributedDataParallel(nn.Embedding(5000, 1, sparse=True))
    hooked(ddp)
    for count in range(1, 5000, 53):
        ddp.zero_grad()
        ddp(torch.arange(count)).sum().backward()
    return len(worker(None)._plans)


def test_few_plans_serve_all_numbers_of_rows(ranks):
    (kept,) = ranks.run(1, plans_kept)
    assert kept < 128


# --- figures --------------------------------------------------------------------------


def same_words(rank, step):
    return torch.arange(24).view(4, 6) + 3 * rank


class Writer:
    def __init__(self):
        self.tags = []

    def add_scalar(self, tag, value, step):
        self.tags.append(tag)


def advised(rank, world_size):
    ddp = make()
    state = hooked(ddp, "quantize:bits=8")
    before = state.stats()["sparse"]
    train(ddp, rank, range(6), same_words)
    advice = state.advise()
    plans = [bucket.plan for bucket in state.reducer.timeline.steps[-1].buckets]
    writer = Writer()
    ck.write_stats(writer, state)
    assert not any("sparse" in tag for tag in writer.tags)
    return before, advice.compressor, state.report(), plans


def test_advice_and_figures_beside_dense_buckets(ranks):
    (one, two) = ranks.run(2, advised)
    assert one[1] == two[1]
    before, _, report, plans = one
    assert before is None
    assert report["words.weight"] == "identity"
    assert report["inner.weight"].startswith("quantize:bits=8")
    assert [plan.bytes_sent == 0 for plan in plans] == [True, False, True]
    assert plans[-1].bytes_dense == 4 * 40 * 8


def test_the_rate_of_a_link_is_that_of_dense_buckets(ranks):
    """How much sparse ones send is not known from their plans."""
    ((_, _, _, plans), _) = ranks.run(2, advised)
    costs = [BucketCost(0.0, 0.0, ms, 0.0) for ms in (50.0, 3.0, 70.0)]
    forecast = Forecast(plans, costs, 1.0, is_exempt=lambda name: False)
    assert forecast.ms_per_byte == pytest.approx(2.0 / plans[1].bytes_sent)


def chosen(rank, world_size):
    ddp = make()
    state = hooked(ddp, ck.Auto(candidates=("quantize:bits=8",), rounds=3))
    train(ddp, rank, range(30), same_words)
    ck.check_sync(ddp)
    return str(state.compressor.choice), state.compressor.milliseconds


def test_auto_chooses(ranks):
    (one, two) = ranks.run(2, chosen)
    assert one == two
    assert one[0] != "None"
    assert set(one[1]) == {"identity", "quantize:bits=8"}


# --- any sparse tensor ----------------------------------------------------------------

SHAPES = {
    "rows": ((50, 3), 1, torch.float32),
    "single elements": ((60,), 1, torch.float64),
    "two sparse dimensions": ((6, 7, 2, 3), 2, torch.float32),
    "complex": ((30, 4), 1, torch.complex64),
    "no elements in a row": ((30, 0), 1, torch.float32),
    "no rows": ((0, 4), 1, torch.float32),
    "all of two rows": ((2, 5), 1, torch.float32),
}


def some(shape, sparse_dim, dtype, rank, count):
    generator = torch.Generator().manual_seed(rank)
    kept = [size for size in shape[:sparse_dim] if size]
    indices = torch.stack(
        [torch.randint(0, size, (count,), generator=generator) for size in kept]
        or [torch.zeros(0, dtype=torch.int64)]
    )
    values = torch.randint(-9, 9, (indices.shape[1], *shape[sparse_dim:]))
    return torch.sparse_coo_tensor(
        indices, values.to(dtype), shape, check_invariants=True
    )


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("what", SHAPES)
def test_any_shape(what, world_size):
    given = [some(*SHAPES[what], rank, 9 - 2 * rank) for rank in range(world_size)]
    kept = [gradient.clone() for gradient in given]
    group = ck.backend.core().ThreadGroup(world_size, 30.0)
    ends = [group.endpoint(rank) for rank in range(world_size)]

    def reduced(rank):
        buckets = SparseBuckets({"w"}, Settings(op="avg"))
        runs = worker(ends[rank])
        return runs.call(lambda: buckets.reduce(runs, ["w"], given[rank], 0)).result

    total = sum(g.to_dense() for g in given)
    union = torch.cat([g._indices() for g in given], 1).unique(dim=1)
    for result in spawn_threads(world_size, reduced):
        assert result.is_coalesced()
        assert (result.shape, result.dtype) == (given[0].shape, given[0].dtype)
        expected = total / world_size
        assert torch.allclose(result.to_dense(), expected, rtol=1e-6)
        assert torch.equal(result.indices(), union)
    for before, after in zip(kept, given, strict=True):
        assert torch.equal(before._values(), after._values())


def test_a_row_that_sums_to_zero_stays():
    one = torch.sparse_coo_tensor(
        [[1, 1, 4]], [[2.0], [-2.0], [0.0]], (6, 1), check_invariants=True
    )
    numbers, values = Table.of(one).read(one)
    assert numbers.tolist() == [1, 4]
    assert values.tolist() == [[0.0], [0.0]]
