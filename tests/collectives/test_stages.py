"""Compressors of several stages in plans, and what integer sums promise."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.simulation import gradient, same_bits, two_shot

import commkern as ck
from commkern import backend
from commkern.compose import Settings, compose
from commkern.groups import worker
from commkern.layout import Member
from commkern.local_transport import LocalGroup
from commkern.plan import Post, WriteHeader
from commkern.residuals import ResidualStore
from commkern.testing import spawn_threads
from commkern.wire import validate

FIXED = ["fixed_point", "fixed_point:bits=8", "fixed_point:rounding=stochastic"]
# Name, elements, compressor (None: dense and without feedback).
MIXED = [
    ("a", 3000, "fixed_point"),
    ("b", 33, None),
    ("c", 1300, "quantize:bits=4,rounding=stochastic"),
    ("d", 700, "fixed_point:bits=8,block_size=24,rounding=stochastic"),
    ("e", 2000, "cast"),
    ("f", 1, "fixed_point"),
]


def endpoints(world_size, kind="compiled"):
    group = LocalGroup(world_size)
    if kind == "compiled":
        group = backend.core().ThreadGroup(world_size)
    return [group.endpoint(rank) for rank in range(world_size)]


def reduce_all(inputs, spec, **options):
    """What each rank of a group of threads gets."""
    ends = endpoints(len(inputs))

    def one(rank):
        tensor = inputs[rank].clone()
        ck.all_reduce(tensor, group=ends[rank], compressor=spec, **options)
        return tensor

    return spawn_threads(len(inputs), one)


def mixed_members():
    store = ResidualStore({n: k for n, k, spec in MIXED if spec}, rollback=True)
    members, offset = [], 0
    for name, numel, spec in MIXED:
        coder = ck.compressor(spec or "identity")
        if spec:
            place, row = store.offset(name), store.row(name)
            members.append(Member(name, numel, offset, coder, place, row))
        else:
            members.append(Member(name, numel, offset, coder))
        offset += numel
    return store, members


# --- plans ------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_sections_of_fewer_stages_ride_in_the_first_rounds(world_size, segments):
    settings = Settings(segments=segments)
    for rank in range(world_size):
        _, members = mixed_members()
        plan = compose(
            members, "float32", rank=rank, world_size=world_size, settings=settings
        )
        posts = [step.round for step in plan.steps if isinstance(step, Post)]
        assert posts == list(range(4 * segments))
        sections = [
            len(validate(s.template.ljust(s.message.nbytes, b"\0")).sections)
            for s in plan.steps
            if isinstance(s, WriteHeader)
        ]
        # "f" would not shrink, so there are five groups, two of them of two stages.
        half = len(sections) // 2
        assert sections == [5] * half + [2] * half


def test_a_plan_of_one_stage_has_two_rounds():
    _, members = mixed_members()
    plan = compose(members[1:3], "float32", rank=0, world_size=2, settings=Settings())
    assert len(plan.exchanges) == 2


@pytest.mark.parametrize(
    ("spec", "dtype", "coded"),
    [
        ("fixed_point", "float32", 2_000_000 + 3907),
        ("fixed_point:bits=8", "float32", 1_000_000 + 3907),
        ("fixed_point:bits=32", "float64", 4_000_000 + 2 * 3907),
        ("fixed_point:bits=32", "float32", 4_000_000),
    ],
)
def test_bytes_on_the_wire(spec, dtype, coded):
    """Of 1,000,000 elements at two ranks, for both passes together."""
    member = Member("w", 1_000_000, 0, ck.compressor(spec))
    plan = compose([member], dtype, rank=0, world_size=2, settings=Settings())
    headers = len(plan.exchanges) * 80
    assert coded <= plan.bytes_sent <= coded + headers
    assert plan.bytes_dense == 1_000_000 * (8 if dtype == "float64" else 4)


def test_too_many_ranks_are_refused():
    member = Member("w", 1000, 0, ck.FixedPoint(bits=8))
    compose([member], "float32", rank=0, world_size=63, settings=Settings())
    with pytest.raises(ValueError, match=r"bits=8 .* at most 63 ranks, got 64"):
        compose([member], "float32", rank=0, world_size=64, settings=Settings())
    end = backend.core().ThreadGroup(64).endpoint(3)
    with pytest.raises(ValueError, match="at most 63 ranks, got 64"):
        ck.all_reduce(torch.ones(1000), group=end, compressor=member.compressor)


# --- bits -------------------------------------------------------------------------


def run_mixed(world_size, segments, *, kind="compiled", steps=3):
    """Results and residuals of every rank, after some steps of error feedback."""
    ends = endpoints(world_size, kind)

    def one(rank):
        store, members = mixed_members()
        runs = worker(ends[rank])
        settings = Settings(op="avg", feedback="error", segments=segments)
        plan = runs.plan(members, "float32", settings)
        results = []
        for step in range(steps):
            data = torch.cat(
                [gradient(rank, numel, torch.float32, step) for _, numel, _ in MIXED]
            )
            run = runs.run(plan, data, seed=1, step=step, residuals=store)
            assert run.finite
            assert run.touched.all()
            store.commit(range(len(store.names())))
            results.append(data)
        return results, {name: store[name].clone() for name in store.names()}

    return spawn_threads(world_size, one)


def by_name(results):
    sizes = [numel for _, numel, _ in MIXED]
    return dict(zip((n for n, *_ in MIXED), results.split(sizes), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_mixed_bucket_equals_its_parameters_alone(world_size):
    found = run_mixed(world_size, 1, steps=1)
    for rank, ((result,), residuals) in enumerate(found):
        for (name, numel, spec), got in zip(
            MIXED, by_name(result).values(), strict=True
        ):
            inputs = [gradient(r, numel, torch.float32) for r in range(world_size)]
            used = spec if numel > 1 and spec else "identity"
            fed = [torch.zeros(numel) for _ in inputs] if spec and numel > 1 else None
            expected = two_shot(
                used, inputs, average=True, residuals=fed, name=name, seed=1
            )
            assert same_bits(got, expected), name
            if used.startswith("fixed_point"):  # the owner's step loses nothing
                assert same_bits(residuals[name], fed[rank])


@pytest.mark.parametrize("segments", [2, 7])
@pytest.mark.parametrize("world_size", [1, 3])
def test_segments_and_transports_change_no_bit(world_size, segments):
    whole = run_mixed(world_size, 1)
    for kind in ("compiled", "local"):
        cut = run_mixed(world_size, segments, kind=kind)
        for (a, kept_a), (b, kept_b) in zip(whole, cut, strict=True):
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
            assert all(same_bits(kept_a[name], kept_b[name]) for name in kept_a)


@pytest.mark.parametrize("spec", ["fixed_point", "fixed_point:bits=8"])
def test_the_order_of_the_ranks_does_not_matter(spec):
    inputs = [gradient(rank, 3000, torch.float32) for rank in range(4)]
    (first, *_) = reduce_all(inputs, spec)
    for order in list(itertools.permutations(range(4)))[1::5]:
        for result in reduce_all([inputs[rank] for rank in order], spec):
            assert same_bits(result, first)
    # Not so for sums of floats.
    (plain, *_), (other, *_) = (
        reduce_all(listed, "identity") for listed in (inputs, inputs[::-1])
    )
    assert not same_bits(plain, other)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("bits", [8, 16])
def test_results_are_those_of_whole_numbers(world_size, bits):
    """In exact arithmetic: each rank's nearest multiple of the step, then their sum."""
    numel, block = 600, 256
    inputs = [gradient(rank, numel, torch.float32) for rank in range(world_size)]
    largest = (2 ** (bits - 1) - 1) // world_size
    digits = (largest + 1).bit_length() - 1
    expected = []
    for begin in range(0, numel, block):
        pieces = [x[begin : begin + block].double().numpy() for x in inputs]
        exponent = int(np.frexp(np.abs(pieces).max())[1])
        step = Fraction(2) ** (exponent - digits)
        codes = [[round(Fraction(v) / step) for v in piece] for piece in pieces]
        clamped = [[max(-largest, min(largest, c)) for c in row] for row in codes]
        sums = [sum(column) for column in zip(*clamped, strict=True)]
        assert all(abs(x) < 2 ** (bits - 1) for x in sums)
        expected += [float(x * step) for x in sums]
    for result in reduce_all(inputs, ck.FixedPoint(bits=bits)):
        assert result.double().tolist() == expected


@pytest.mark.parametrize("spec", FIXED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nan_of_one_rank_reaches_its_block_on_all(spec, value):
    inputs = [gradient(rank, 3000, torch.float32) for rank in range(3)]
    clean = reduce_all(inputs, spec)[0]
    inputs[1][1000] = value
    outside = torch.ones(3000, dtype=torch.bool)
    outside[768:1024] = False
    for result in reduce_all(inputs, spec):
        assert result[~outside].isnan().all()
        assert same_bits(result[outside], clean[outside])


@pytest.mark.parametrize("rollback", [True, False])
def test_a_spoilt_step_leaves_the_residuals_alone(rollback):
    ends = endpoints(3)

    def one(rank):
        state = ck.ReduceState(rollback=rollback)
        kept = []
        for step in range(2):
            tensor = gradient(rank, 300, torch.float32, seed=step)
            if step == 1 and rank == 1:
                tensor[40] = torch.nan
            ck.all_reduce(
                tensor, group=ends[rank], compressor="fixed_point:bits=8", state=state
            )
            kept.append(state.residual(""))
        return kept

    for before, after in spawn_threads(3, one):
        assert before[:256].norm() > 0
        assert same_bits(before[:256], after[:256])  # the block of the NaN
        assert same_bits(before[256:], after[256:]) == rollback


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_beyond_the_largest_number_average(dtype):
    top = torch.finfo(dtype).max
    inputs = [torch.full((300,), top, dtype=dtype) for _ in range(2)]
    for result in reduce_all(inputs, "fixed_point", op=torch.distributed.ReduceOp.AVG):
        assert result.isfinite().all()
        assert (result > 0.9999 * top).all()
    for result in reduce_all(inputs, "fixed_point"):
        assert result.isinf().all()
