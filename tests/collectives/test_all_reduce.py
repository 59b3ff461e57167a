"""`all_reduce` over gloo: every rank gets the bits of a simulation that knows nothing
of owners and messages."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from tests.simulation import gradient, same_bits, two_shot

import commkern as ck
from commkern.compose import Settings
from commkern.groups import worker
from commkern.layout import Member

COMPRESSORS = [
    "identity",
    "cast:dtype=bf16",
    "cast:dtype=fp16",
    "quantize:bits=8",
    "quantize:bits=4,block_size=64",
    "quantize:bits=8,rounding=stochastic",
    "quantize:bits=4,rounding=stochastic,block_size=24",
    "fixed_point",
    "fixed_point:bits=8,rounding=stochastic,block_size=24",
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, 3, 5, 31, 127, 128, 129, 1000, 4099]


def reduce_all_sizes(rank, world_size, spec, dtype):
    results = []
    for numel in SIZES:
        tensor = gradient(rank, numel, dtype)
        ck.all_reduce(tensor, compressor=spec, seed=7)
        results.append(tensor)
    return results


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_world_size(ranks, world_size):
    for spec in COMPRESSORS:
        results = ranks.run(world_size, reduce_all_sizes, spec, torch.float32)
        check_all_sizes(results, world_size, spec, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_dtype(ranks, dtype):
    for spec in COMPRESSORS:
        results = ranks.run(3, reduce_all_sizes, spec, dtype)
        check_all_sizes(results, 3, spec, dtype)


def check_all_sizes(results, world_size, spec, dtype):
    for call, numel in enumerate(SIZES):
        inputs = [gradient(rank, numel, dtype) for rank in range(world_size)]
        coder = smaller(spec, numel, dtype)
        expected = two_shot(coder, inputs, seed=7, step=call)
        for rank in range(world_size):
            assert same_bits(results[rank][call], expected), (spec, numel, rank)


def smaller(spec, numel, dtype):
    """Small tensors travel uncompressed where coding would not make them smaller."""
    from commkern.layout import Member, effective

    member = Member("", numel, 0, ck.compressor(spec))
    return effective(member, str(dtype).removeprefix("torch.")).compressor


def reduce_avg(rank, world_size):
    tensor = gradient(rank, 1000, torch.float32)
    ck.all_reduce(tensor, dist.ReduceOp.AVG, compressor="quantize:bits=8")
    plain = gradient(rank, 1000, torch.float32)
    ck.all_reduce(plain, dist.ReduceOp.AVG)
    return tensor, plain


def test_average(ranks):
    inputs = [gradient(rank, 1000, torch.float32) for rank in range(4)]
    for tensor, plain in ranks.run(4, reduce_avg):
        assert same_bits(tensor, two_shot("quantize:bits=8", inputs, average=True))
        assert same_bits(plain, two_shot("identity", inputs, average=True))


def half_sum_in_range(rank, world_size):
    tensor = torch.full((300,), 80000.0 / world_size, dtype=torch.float32)
    over = torch.full((300,), 70000.0, dtype=torch.float32)
    ck.all_reduce(tensor, dist.ReduceOp.AVG, compressor="cast:dtype=fp16")
    ck.all_reduce(over, dist.ReduceOp.AVG, compressor="cast:dtype=fp16")
    return tensor, over


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_half_precision_sum_does_not_overflow_before_the_division(ranks, world_size):
    expected = torch.tensor(80000.0 / world_size).half().float()
    for tensor, over in ranks.run(world_size, half_sum_in_range):
        assert torch.allclose(tensor, expected.expand(300), rtol=2**-10)
        assert torch.isinf(over).all()


def reduce_views(rank, world_size):
    base = gradient(rank, 600, torch.float32).reshape(20, 30)
    transposed = base.clone().t()
    sliced = base.clone()[:, 3:17]
    complex_ = torch.view_as_complex(base.clone().reshape(300, 2))
    scalar = base[1, 1].clone()
    conjugate, negative = complex_.clone().conj(), complex_.clone().conj().imag
    for tensor in (transposed, sliced, complex_, scalar, conjugate, negative):
        ck.all_reduce(tensor)
    lazy = conjugate.resolve_conj(), negative.resolve_neg()
    return transposed.clone(), sliced.clone(), complex_, scalar, *lazy


def test_strides_complex_and_scalars(ranks):
    inputs = [gradient(r, 600, torch.float32).reshape(20, 30) for r in range(2)]
    total = inputs[0] + inputs[1]
    for results in ranks.run(2, reduce_views):
        transposed, sliced, complex_, scalar, conjugate, negative = results
        assert torch.equal(conjugate, complex_.conj())
        assert torch.equal(negative, -complex_.imag)
        assert torch.equal(transposed, total.t())
        assert torch.equal(sliced, total[:, 3:17])
        assert torch.equal(torch.view_as_real(complex_).reshape(20, 30), total)
        assert scalar.shape == ()
        assert scalar == total[1, 1]


def sums_to_zero_in_rank_order(rank, world_size):
    values = [1e8, 1.0, -1e8]
    left = {}
    for size in (3, 1000, 30_000, 3_000_000):  # the last is summed where it lies
        tensor = torch.full((size,), values[rank])
        ck.all_reduce(tensor, deterministic=True)
        left[size] = torch.count_nonzero(tensor).item()
    return left


def test_sums_are_taken_in_rank_order(ranks):
    for left in ranks.run(3, sums_to_zero_in_rank_order):
        assert left == {3: 0, 1000: 0, 30_000: 0, 3_000_000: 0}


def feedback_ledger(rank, world_size, spec, steps):
    state = ck.ReduceState(feedback="error")
    total = torch.zeros(5000, dtype=torch.float64)
    wanted = torch.zeros(5000, dtype=torch.float64)
    for step in range(steps):
        tensor = gradient(rank, 5000, torch.float32, seed=step)
        wanted += tensor.double()
        ck.all_reduce(tensor, compressor=spec, state=state, name="w")
        total += tensor.double()
    return total, wanted, state.residual("w")


@pytest.mark.parametrize(
    "spec", ["quantize:bits=4", "cast:dtype=bf16", "fixed_point:bits=8"]
)
def test_the_ledger_of_error_feedback(ranks, spec):
    results = ranks.run(3, feedback_ledger, spec, 6)
    total = results[0][0]
    wanted = sum(r[1] for r in results)
    left = sum(r[2].double() for r in results)
    assert left.norm() > 0
    assert (total + left - wanted).norm() / wanted.norm() < 1e-6


def feedback_bits(rank, world_size):
    state = ck.ReduceState()
    tensors = []
    for step in range(3):
        tensor = gradient(rank, 300, torch.float32, seed=step)
        ck.all_reduce(tensor, compressor="quantize:bits=4", state=state)
        tensors.append(tensor)
    return tensors


def test_error_feedback_is_that_of_one_rank_in_bits(ranks):
    (results,) = ranks.run(1, feedback_bits)
    residual = [torch.zeros(300)]
    for step, tensor in enumerate(results):
        expected = two_shot(
            "quantize:bits=4",
            [gradient(0, 300, torch.float32, seed=step)],
            residuals=residual,
            step=step,
        )
        assert same_bits(tensor, expected)


def asynchronous(rank, world_size):
    tensors = [gradient(rank, 5000, torch.float32, seed=i) for i in range(8)]
    works = [ck.all_reduce(t, async_op=True) for t in tensors]
    future = works[3].get_future()
    future.wait()
    waited = [work.wait() for work in works]
    done = [work.is_completed() and work.is_success() for work in works]
    assert works[3].exception() is None
    assert future.value()[0] is tensors[3]
    return tensors, waited, done


def test_async_works(ranks):
    for tensors, waited, done in ranks.run(2, asynchronous):
        assert all(waited)
        assert all(done)
        for i, tensor in enumerate(tensors):
            inputs = [gradient(r, 5000, torch.float32, seed=i) for r in range(2)]
            assert torch.equal(tensor, inputs[0] + inputs[1])


def beside_the_users_collectives(rank, world_size):
    for i in range(50):
        work = ck.all_reduce(torch.full((1000,), float(i)), async_op=True)
        plain = torch.full((1000,), 1.0)
        dist.all_reduce(plain)
        assert plain[0] == world_size
        sent = dist.isend(torch.full((4,), float(rank)), (rank + 1) % world_size)
        received = torch.empty(4)
        dist.recv(received, (rank - 1) % world_size)
        sent.wait()
        assert received[0] == (rank - 1) % world_size
        work.wait()
    return True


def test_runs_beside_the_users_own_collectives(ranks):
    assert all(ranks.run(3, beside_the_users_collectives))


def noise_changes_with_each_call(rank, world_size):
    results = []
    for _ in range(2):
        tensor = gradient(0, 4096, torch.float32)
        ck.all_reduce(tensor, compressor="quantize:bits=4,rounding=stochastic")
        results.append(tensor)
    return results


def test_noise_is_new_each_call_and_equal_on_all_ranks(ranks):
    (a, b), (c, d) = ranks.run(2, noise_changes_with_each_call)
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert not torch.equal(a, b)


def sub_group(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    tensor = torch.tensor([1.0, 3.0, 5.0, 7.0])[rank].repeat(500)
    for _ in range(3 if rank < 2 else 5):
        result = tensor.clone()
        ck.all_reduce(result, dist.ReduceOp.AVG, mine, compressor="quantize:bits=8")
    return result


def test_sub_groups_with_different_numbers_of_calls(ranks):
    results = ranks.run(4, sub_group)
    for rank, expected in enumerate([2.0, 2.0, 6.0, 6.0]):
        assert torch.allclose(results[rank], torch.full((500,), expected), rtol=1e-6)


def random_state_is_left_alone(rank, world_size):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ck.all_reduce(torch.ones(1000), compressor="quantize:bits=8,rounding=stochastic")
    return torch.equal(before, torch.get_rng_state())


def test_no_global_random_state_is_touched(ranks):
    assert all(ranks.run(2, random_state_is_left_alone))


def in_segments(rank, world_size, segments):
    coder = ck.compressor("quantize:bits=8")
    data = gradient(rank, 5000, torch.float32)
    runs = worker()
    plan = runs.plan(
        [Member("", 5000, 0, coder)], "float32", Settings(segments=segments)
    )
    for step in range(3):
        data = gradient(rank, 5000, torch.float32)
        runs.call(functools.partial(runs.run, plan, data, seed=0, step=step))
    return data


@pytest.mark.parametrize("segments", [2, 5])
def test_segments_change_no_bit(ranks, segments):
    inputs = [gradient(rank, 5000, torch.float32) for rank in range(3)]
    for result in ranks.run(3, in_segments, segments):
        assert same_bits(result, two_shot("quantize:bits=8", inputs))
