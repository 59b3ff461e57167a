"""Gradients at the ends of a dtype's range, and blocks of zeros, under DDP."""

from __future__ import annotations

import pytest
import torch
from tests.hook.given import reduced, registered, simulated
from tests.laws import EVERY
from tests.simulation import same_bits, two_shot

import commkern as ck

INF = float("inf")
OVERFLOWING = ("natural", "qsgd", "rotated")


def half_precision(rank, world_size):
    """fp16 constants: the sum of two or eight would overflow before the division."""
    results = {}
    for spec in ("identity", "cast:dtype=fp16", "quantize:bits=8", "fixed_point"):
        for value in (40000.0, 10000.0, 65504.0, INF):
            values = {"w": torch.full((4, 300), value, dtype=torch.float16)}
            ddp, _ = registered(values, spec)
            results[spec, value] = reduced(ddp, values)["w"]
    return results


def test_half_precision_does_not_overflow_before_the_division(ranks):
    for world_size in (2, 8):
        for results in ranks.run(world_size, half_precision):
            for (spec, value), result in results.items():
                if value == INF:
                    assert not result.isfinite().any(), spec
                elif spec in ("identity", "cast:dtype=fp16", "quantize:bits=8"):
                    assert torch.equal(result, torch.full_like(result, value)), spec
                else:
                    assert ((result - value).abs() <= value / 1000).all(), (spec, value)


def beyond_half_precision(rank, world_size):
    """fp32 gradients that fp16 cannot hold: Inf on every rank, for a loss scaler."""
    values = {"w": torch.full((4, 300), 70000.0)}
    ddp, _ = registered(values, "cast:dtype=fp16")
    return reduced(ddp, values)["w"]


def test_a_cast_past_the_range_is_inf_everywhere(ranks):
    for result in ranks.run(2, beyond_half_precision):
        assert not result.isfinite().any()


def overflowing(rank, world_size):
    """Gradients in range whose decoded form is not: what the step tells, by coder."""
    generator = torch.Generator().manual_seed(0)
    half = (65504 * (0.8 + 0.2 * torch.rand(4, 300, generator=generator))).half()
    single = torch.zeros(4, 300)
    single[0, 5] = 1e38
    told = {}
    for coder in OVERFLOWING:
        values = single if coder == "rotated" else half
        ddp, state = registered({"w": values}, coder, nonfinite="raise")
        try:
            reduced(ddp, {"w": values})
        except ck.NonFiniteError:
            told[coder] = state.stats()["committed"], ddp.module.w.grad.isfinite().all()
    return told


def test_a_result_past_the_range_is_told_and_leaves_no_trace(ranks):
    for told in ranks.run(2, overflowing):
        assert told == dict.fromkeys(OVERFLOWING, (False, False))


def same_everywhere(rank, world_size):
    """Codes must not wrap around: [1, -1, 0.5] on every rank."""
    values = {"w": torch.tensor([1.0, -1.0, 0.5]).repeat(200)}
    results = {}
    for spec in ("quantize:bits=8", "quantize:bits=4", "fixed_point:bits=8"):
        ddp, _ = registered(values, spec)
        results[spec] = reduced(ddp, values)["w"]
    return results, values["w"]


def test_sums_of_codes_do_not_wrap_around(ranks):
    bounds = {"quantize:bits=8": 1 / 127, "quantize:bits=4": 1 / 7}
    for world_size in (2, 8):
        for results, wanted in ranks.run(world_size, same_everywhere):
            for spec, result in results.items():
                bound = bounds.get(spec, world_size / 128)
                assert (result - wanted).abs().max() <= bound, (spec, world_size)


def test_sums_over_three_hundred_ranks_do_not_wrap_around():
    wanted = torch.tensor([1.0, -1.0, 0.5])
    bounds = {"quantize:bits=8": 1 / 127, "quantize:bits=4": 1 / 7}
    bounds["fixed_point:bits=16"] = 300 / 2**15  # a step: 300 such codes fit
    for spec, bound in bounds.items():
        ck.compressor(spec).check_world_size(300)
        result = two_shot(spec, [wanted] * 300, average=True)
        assert (result - wanted).abs().max() <= bound, spec
    with pytest.raises(ValueError, match="bits=8 serves at most 63 ranks, got 300"):
        ck.compressor("fixed_point:bits=8").check_world_size(300)


EIGHT_BIT_FLOATS = [
    "float8:format=e4m3",
    "float8:format=e5m2",
    "float8:block_size=None",
    "microscaling:format=mxfp8_e4m3",
    "microscaling:format=mxfp8_e5m2",
]


def past_the_largest_float8(rank, world_size):
    """448 is the largest number of e4m3: scales must take in what is larger."""
    values = {"w": torch.tensor([1000.0, -1000.0, 1.0]).repeat(200)}
    return {
        spec: reduced(registered(values, spec)[0], values)["w"]
        for spec in EIGHT_BIT_FLOATS
    }


def test_values_past_the_largest_float8(ranks):
    wanted = torch.tensor([1000.0, -1000.0, 1.0]).repeat(200)
    for results in ranks.run(2, past_the_largest_float8):
        for spec, result in results.items():
            coder = ck.compressor(spec)
            once = coder.decompress(coder.compress(wanted))
            bound = coder.error_bound(1000.0, "float32")
            assert bound <= 130, spec  # an eighth, of mxfp8 e5m2
            assert (once - wanted).abs().max() <= bound, spec
            # Of each part, and of their sum; halved for the average.
            bound += coder.error_bound(2 * (1000.0 + bound), "float32") / 2
            assert (result - wanted).abs().max() <= bound, spec
            if spec.startswith("float8"):  # a scale for the largest element
                assert (once[:2] - wanted[:2]).abs().max() <= 70, spec


def zeros(rank, world_size):
    for spec in EVERY:
        half = torch.zeros(2048)
        half[1024:] = 3.0  # a multiple of every block
        values = {
            "all": torch.zeros(32, 64),
            "partly": half,
            "one": torch.zeros(1),
            "mine": torch.full((1024,), float(rank)),  # zero on rank 0 only
        }
        ddp, state = registered(values, spec)
        for step in range(2):
            results = reduced(ddp, values)
            assert state.stats()["committed"], spec
            assert torch.equal(results["all"], torch.zeros(32, 64)), spec
            assert torch.equal(results["one"], torch.zeros(1)), spec
            if "none" not in spec and "parameter" not in spec:
                assert not results["partly"][:1024].any(), spec
            for name, result in results.items():
                assert result.isfinite().all(), (spec, name)
                if step == 0 and name in ("partly", "mine"):
                    parts = [values[name]] * world_size
                    if name == "mine":
                        parts = [torch.full((1024,), float(r)) for r in (0, 1)]
                    expected = simulated(spec, name, parts)
                    assert same_bits(result, expected), (spec, name)
        residuals = state.state_dict()["residuals"]
        assert all(r.isfinite().all() for r in residuals.values()), spec
    return True


def test_zeros_stay_zeros(ranks):
    assert all(ranks.run(2, zeros))


def small_values(rank, world_size):
    signs = torch.tensor([1.0, -1.0]).repeat(600)
    mixed = torch.full((1200,), 1e-6)
    mixed[::2] = 1.0
    values = {
        "sixteen": (1e-6 * signs).half(),
        "tiny": 1e-38 * signs,
        "denormal": 1e-42 * signs,
        "mixed": mixed,
    }
    ddp, state = registered(values, "quantize:bits=8")
    total = torch.zeros(1200, dtype=torch.float64)
    for _ in range(5):
        results = reduced(ddp, values)
        total += results["mixed"].double()
    return values, results, total, state.state_dict()["residuals"]["mixed"]


def test_scales_do_not_underflow(ranks):
    found = ranks.run(2, small_values)
    values, results, total, _ = found[0]
    half = values["sixteen"].double()
    error = (results["sixteen"].double() - half).abs() / half.abs()
    assert error.max() < 0.01
    for name in ("tiny", "denormal"):
        assert results[name].isfinite().all()
        assert (results[name] - values[name]).abs().max() <= values[name].abs().max()
    left = sum(residual.double() for *_, residual in found) / 2
    wanted = 5 * values["mixed"].double()
    assert (total + left - wanted).abs().max() <= 1e-6
    assert (left[1::2] > 4e-6).all()  # what is too small for the block is kept
