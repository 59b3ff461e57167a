"""The same collectives with ranks as threads of one process: many shapes, quickly."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.simulation import gradient, same_bits, two_shot

import commkern as ck
from commkern import backend
from commkern.compose import Settings
from commkern.groups import worker
from commkern.layout import Member
from commkern.local_transport import LocalGroup
from commkern.residuals import ResidualStore
from commkern.testing import spawn_threads

NUMEL = 5000
CODERS = ["identity", "cast:dtype=bf16", "quantize:bits=4", "fixed_point"]


def endpoints(kind, world_size):
    if kind == "local":
        group = LocalGroup(world_size)
    else:
        group = backend.core().ThreadGroup(world_size)
    return [group.endpoint(rank) for rank in range(world_size)]


@pytest.mark.parametrize("kind", ["compiled", "local"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("spec", CODERS)
def test_all_reduce(kind, world_size, spec):
    ends = endpoints(kind, world_size)
    inputs = [gradient(rank, NUMEL, torch.float32) for rank in range(world_size)]
    expected = two_shot(spec, inputs)

    def one(rank):
        tensor = inputs[rank].clone()
        ck.all_reduce(tensor, group=ends[rank], compressor=spec)
        return tensor

    for result in spawn_threads(world_size, one):
        assert same_bits(result, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_plain_parts_are_summed_where_they_lie(world_size, dtype):
    ends = endpoints("compiled", world_size)
    numel = 3 * 2**17 + 77
    inputs = [gradient(rank, numel, dtype) for rank in range(world_size)]
    expected = two_shot("identity", inputs)

    def one(rank):
        tensor = inputs[rank].clone()
        ck.all_reduce(tensor, group=ends[rank], compressor="identity")
        return tensor

    for result in spawn_threads(world_size, one):
        assert same_bits(result, expected)
    plan = worker(ends[0]).plan(
        [Member("", numel, 0, ck.compressor("identity"))],
        str(dtype).removeprefix("torch."),
        Settings(),
    )
    names = [getattr(step, "name", "") for step in plan.steps]
    assert names.count("sum") == 1
    assert not {"cast", "recast_sum", "uncast"} & set(names)


def fed_members(sizes, coder):
    """Parameters one behind the other, with error feedback."""
    store = ResidualStore(sizes, rollback=True)
    members, offset = [], 0
    for name, size in sizes.items():
        place, row = store.offset(name), store.row(name)
        members.append(Member(name, size, offset, coder, place, row))
        offset += size
    return store, members


@pytest.mark.parametrize("segments", [2, 3, 7])
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("reference", [False, True])
def test_segments_change_no_bit(monkeypatch, segments, world_size, reference):
    if reference:
        monkeypatch.setenv("COMMKERN_BACKEND", "reference")
    coder = ck.compressor("quantize:bits=4,rounding=stochastic")
    ends = endpoints("local" if reference else "compiled", world_size)
    sizes = {"a": 3000, "b": 7, "c": 1300}

    def one(rank, segments):
        store, members = fed_members(sizes, coder)
        data = gradient(rank, sum(sizes.values()), torch.float32)
        runs = worker(ends[rank])
        plan = runs.plan(members, "float32", Settings(segments=segments))
        runs.submit(
            lambda: runs.run(plan, data, seed=1, step=5, residuals=store)
        ).result()
        store.commit([0, 1, 2])
        return data, torch.cat([store[name] for name in sizes])

    whole = spawn_threads(world_size, lambda rank: one(rank, 1))
    cut = spawn_threads(world_size, lambda rank: one(rank, segments))
    for (a, kept_a), (b, kept_b) in zip(whole, cut, strict=True):
        assert same_bits(a, b)
        assert same_bits(kept_a, kept_b)


def test_a_parameter_that_no_rank_used_is_zero_and_keeps_its_residual():
    coder = ck.compressor("quantize:bits=4")
    ends = endpoints("compiled", 2)
    sizes = {"a": 1000, "b": 1000}

    def one(rank):
        store, members = fed_members(sizes, coder)
        store["b"].fill_(0.25)
        data = torch.cat([gradient(rank, 1000, torch.float32), torch.zeros(1000)])
        runs = worker(ends[rank])
        plan = runs.plan(members, "float32", Settings())
        return data, runs.run(plan, data, seed=0, step=0, residuals=store)

    for data, outcome in spawn_threads(2, one):
        assert outcome.touched.tolist() == [True, False]
        assert torch.equal(data[1000:], torch.zeros(1000))
        assert data[:1000].abs().sum() > 0


@pytest.mark.parametrize("kind", ["compiled", "local"])
def test_a_worker_does_not_outlive_its_endpoint(kind):
    (end,) = endpoints(kind, 1)
    ck.all_reduce(torch.ones(10), group=end)
    gone = weakref.ref(worker(end))
    del end
    gc.collect()
    assert gone() is None
