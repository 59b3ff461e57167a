"""Compiled sums and checks over dense data against the reference, in bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import (
    DTYPES,
    MISALIGNMENTS,
    compare,
    decode,
    encode,
    filler,
    make_spans,
    numbers,
)
from tests.tolerances import assert_within, sum_of_ranks

from commkern.reference.numerics import FORMATS

LENGTHS = [*range(130), 255, 256, 257, 1031, 4096]


def spans_of(lengths: list[int]) -> tuple[np.ndarray, int]:
    spans, elements, _, _ = make_spans(lengths, lambda length: 0)
    return spans, elements


def sum_case(dtype: str, lengths: list[int], world_size: int) -> dict[str, Any]:
    spans, elements = spans_of(lengths)
    return {
        "spans": spans,
        "parts": [numbers(rank, elements, dtype) for rank in range(world_size)],
        "output": filler(elements, FORMATS[dtype].storage),
        "dtype": dtype,
    }


@pytest.mark.parametrize("world_size", [*range(1, 9), 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum(compiled: Any, dtype: str, world_size: int) -> None:
    case = sum_case(dtype, [0, 1, 7, 64, 257], world_size)
    for scale in (1.0, 1 / world_size):
        compare(compiled, "sum", **case, scale=scale)


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(compiled: Any, dtype: str, shift: int) -> None:
    case = sum_case(dtype, LENGTHS, 3)
    compare(compiled, "sum", shift=shift, **case, scale=1 / 3)
    one = {"spans": case["spans"], "dtype": dtype}
    data = {"input": case["parts"][0]}
    rows = len(LENGTHS)
    maxima = filler(rows, FORMATS[dtype].compute)
    compare(compiled, "absmax", shift=shift, **one, **data, output=maxima)
    for kernel in ("nonfinite_check", "nonzero_check"):
        flags = filler(rows)
        compare(compiled, kernel, shift=shift, **one, **data, flags=flags)
    case["parts"][0][::7] = encode(np.array([np.nan]), dtype)
    for limit in (0.0, -0.0, 0.3, 100.0, 1e300, np.inf):
        moved = {"data": case["parts"][0], "limit": limit}
        compare(compiled, "saturate", shift=shift, **one, **moved)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_into_one_of_its_parts(compiled: Any, dtype: str) -> None:
    for rank in range(3):
        case = sum_case(dtype, [0, 1, 64, 257], 3)
        compare(compiled, "sum", **case | {"output": case["parts"][rank]})


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_is_in_rank_order(implementation: Any, dtype: str) -> None:
    """A large part that is taken away again loses the small ones before it only."""
    large = 2.0**11 if dtype == "float16" else 2.0**60
    for order, expected in (
        ([large, 1.0, -large, 3.0], 3.0),
        ([1.0, large, -large], 0.0),
    ):
        spans, _ = spans_of([40])
        parts = [encode(np.full(43, value * 2**24), dtype) for value in order]
        if dtype == "float16":
            parts = [encode(np.full(43, value), dtype) for value in order]
            expected = sum(order)  # its sums are exact in fp32
        output = encode(np.zeros(43), dtype)
        implementation.sum(spans=spans, parts=parts, output=output, dtype=dtype)
        scale = 1 if dtype == "float16" else 2**24
        assert set(decode(output, dtype)[3:] / scale) == {expected}


@pytest.mark.parametrize("world_size", [2, 7, 300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mean_is_within_its_bound(
    implementation: Any, dtype: str, world_size: int
) -> None:
    case = sum_case(dtype, [200], world_size)
    implementation.sum(**case, scale=1 / world_size)
    parts = np.array([decode(part, dtype)[3:203] for part in case["parts"]])
    exact = [math.fsum(column) / world_size for column in parts.T]
    magnitudes = np.abs(parts).sum(axis=0) / world_size
    # One more rounding: that of the scale itself.
    bound = sum_of_ranks(magnitudes, world_size + 1, dtype)
    assert_within(decode(case["output"], dtype)[3:203], exact, bound)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_special_value_is_found(compiled: Any, dtype: str, special: float) -> None:
    """At every place of spans around the vector widths."""
    for length in (1, 16, 31, 64, 67):
        spans, elements = spans_of([length, length, length])
        one = {"spans": spans, "dtype": dtype}
        for place in range(length):
            data = numbers(4, elements, dtype)
            data[spans[1]["offset"] + place] = encode(np.array([special]), dtype)[0]
            flags = np.zeros(3, np.uint8)
            found = compare(compiled, "nonfinite_check", **one, input=data, flags=flags)
            assert found["flags"].tolist() == [0, 1, 0]
            maxima = np.zeros(3, FORMATS[dtype].compute)
            view = {"output": FORMATS[dtype].compute.name}
            found = compare(
                compiled, "absmax", nan_view=view, **one, input=data, output=maxima
            )
            assert np.isfinite(found["output"]).tolist() == [True, False, True]
            parts = [numbers(5, elements, dtype), data]
            summed = {"parts": parts, "output": np.zeros_like(data), "nonfinite": flags}
            found = compare(
                compiled, "sum", **one, **summed, nan_view={"output": dtype}
            )
            assert found["nonfinite"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nonzero_value_is_found(compiled: Any, dtype: str) -> None:
    smallest = {"float64": 5e-324, "float32": 1e-45, "float16": 6e-8, "bfloat16": 1e-40}
    for length in (1, 16, 31, 64, 67):
        spans, elements = spans_of([length, length])
        zeros = encode(np.full(elements, -0.0), dtype)
        for place in range(length):
            data = zeros.copy()
            where = spans[1]["offset"] + place
            data[where] = encode(np.array([smallest[dtype]]), dtype)[0]
            assert decode(data[where : where + 1], dtype)[0] > 0
            flags = np.zeros(2, np.uint8)
            found = compare(
                compiled,
                "nonzero_check",
                spans=spans,
                dtype=dtype,
                input=data,
                flags=flags,
            )
            assert found["flags"].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_special_values(compiled: Any, dtype: str) -> None:
    case = sum_case(dtype, [301], 3)
    values = [np.nan, np.inf, -np.inf, 6e4, -6e4]
    for rank, part in enumerate(case["parts"]):
        part[rank :: 4 + rank] = np.resize(
            encode(np.array(values), dtype), part[rank :: 4 + rank].size
        )
    compare(compiled, "sum", nan_view={"output": dtype}, **case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturate_values(implementation: Any, dtype: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 2.0, -2.0, 1.5, -1.5, -0.0, 0.25])
    spans, _ = spans_of([values.size])
    data = encode(np.concatenate([np.full(3, np.nan), values]), dtype)
    implementation.saturate(spans=spans, data=data, dtype=dtype, limit=1.5)
    expected = [0.0, 1.5, -1.5, 1.5, -1.5, 1.5, -1.5, -0.0, 0.25]
    result = decode(data, dtype)
    np.testing.assert_array_equal(result[3:], expected)
    np.testing.assert_array_equal(np.signbit(result[3:]), np.signbit(expected))
    assert np.isnan(result[:3]).all(), "elements outside the span must stay"
