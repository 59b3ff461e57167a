"""Hypothesis: any spans, settings and values give equal bytes on every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.harness import DTYPES, compare
from tests.kernels.test_cast import cast_case
from tests.kernels.test_fixed_point import decode_case as fixed_decode_case
from tests.kernels.test_fixed_point import exponents_case, fixed_case
from tests.kernels.test_quantize import FEEDBACKS, decode_case, quantize_case, sum_case

from commkern import reference

FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LENGTHS = st.lists(st.integers(0, 300), max_size=5)


def any_bits(data: st.DataObject, case: dict[str, Any]) -> None:
    """Fill some of the input with raw bits: any number, NaN and Inf among them."""
    chosen = data.draw(st.lists(st.binary(min_size=8, max_size=8), max_size=9))
    raw = case["input"].view(np.uint8)
    for index, pattern in enumerate(chosen):
        piece = np.frombuffer(pattern, np.uint8)
        start = index * 72 % max(raw.size - 8, 1) // 8 * 8
        raw[start : start + 8] = piece[: raw.size - start]


@FEW
@given(st.data())
def test_quantizers(compiled: Any, data: st.DataObject) -> None:
    case = quantize_case(
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([4, 8])),
        data.draw(st.integers(2, 12)) * 8,
        data.draw(LENGTHS),
        data.draw(st.sampled_from(FEEDBACKS)),
        rounding=data.draw(st.sampled_from(["nearest", "stochastic"])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
        step=data.draw(st.integers(0, 2**32 - 1)),
        stream=data.draw(st.integers(0, 2**32 - 1)),
    )
    any_bits(data, case)
    shift = data.draw(st.integers(0, 15))
    written = compare(compiled, "quantize", shift=shift, **case)
    decoding = decode_case(case, written["payload"])
    view = {"output": case["dtype"]}
    scale = data.draw(st.sampled_from([1.0, 0.5, 1 / 3]))
    compare(compiled, "dequantize", nan_view=view, **decoding, scale=scale)
    compare(compiled, "dequantize_add", nan_view=view, **decoding, scale=scale)
    summing = sum_case(case, data.draw(st.integers(1, 4)))
    summing["parts"].append(written["payload"])
    compare(compiled, "requantize_sum", shift=shift, **summing)


@FEW
@given(st.data())
def test_fixed_point(compiled: Any, data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([8, 16, 32]))
    case = fixed_case(
        data.draw(st.sampled_from(DTYPES)),
        bits,
        data.draw(st.integers(2, 40)) * 8,
        data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=5)),
        data.draw(st.sampled_from(FEEDBACKS)),
        digits=data.draw(st.integers(1, bits - 1)),
        largest=data.draw(st.integers(1, 2 ** (bits - 1) - 1)),
        rounding=data.draw(st.sampled_from(["nearest", "stochastic"])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
        step=data.draw(st.integers(0, 2**32 - 1)),
        stream=data.draw(st.integers(0, 2**32 - 1)),
    )
    any_bits(data, case)
    shift = data.draw(st.integers(0, 15))
    compare(compiled, "block_exponents", shift=shift, **exponents_case(case))
    if data.draw(st.booleans()):  # else they are those of other numbers
        reference.block_exponents(**exponents_case(case))
    written = compare(compiled, "fixed_quantize", shift=shift, **case)
    decoding = fixed_decode_case(case, written["payload"])
    view = {"output": case["dtype"]}
    scale = data.draw(st.sampled_from([1.0, 0.5, 1 / 3]))
    compare(compiled, "fixed_dequantize", nan_view=view, **decoding, scale=scale)
    compare(compiled, "fixed_dequantize_add", nan_view=view, **decoding, scale=scale)


@FEW
@given(st.data())
def test_casts(compiled: Any, data: st.DataObject) -> None:
    case = cast_case(
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from(["float16", "bfloat16"])),
        data.draw(LENGTHS),
        data.draw(st.sampled_from(FEEDBACKS)),
    )
    any_bits(data, case)
    if case["dtype"] == case["wire_dtype"] and case["residual"] is not None:
        case["residual"] = None
    compare(compiled, "cast", shift=data.draw(st.integers(0, 15)), **case)
