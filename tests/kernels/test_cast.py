"""Compiled casts against the reference, in bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import (
    DTYPES,
    MISALIGNMENTS,
    cast_body,
    compare,
    decode,
    encode,
    filler,
    make_spans,
    numbers,
)
from tests.kernels.test_quantize import FEEDBACKS, VECTOR, feedback_of

LENGTHS = [0, 1, 15, 16, 17, 64, 257, 1031]
SPECIAL = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-45,
    6e-8,
    65504.0,
    65520.0,
    3.4e38,
    1e300,
]


def cast_case(
    dtype: str, wire_dtype: str, lengths: list[int], feedback: str = "none"
) -> dict[str, Any]:
    spans, elements, nbytes, count = make_spans(
        lengths, cast_body(wire_dtype), shuffle=True
    )
    return {
        "spans": spans,
        "input": numbers(1, elements, dtype),
        "dtype": dtype,
        "payload": filler(nbytes),
        "wire_dtype": wire_dtype,
        "residual": feedback_of(feedback, count, len(lengths)),
    }


def uncast_case(case: dict[str, Any], payload: np.ndarray) -> dict[str, Any]:
    return {name: case[name] for name in ("spans", "dtype", "wire_dtype")} | {
        "payload": payload,
        "output": numbers(2, len(case["input"]), case["dtype"]),
        "nonfinite": np.zeros(len(case["spans"]), np.uint8),
    }


def sum_case(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    fields = ("spans", "dtype", "wire_dtype", "payload", "residual")
    return {name: case[name] for name in fields} | {
        "parts": [wire_bytes(case, 20 + rank) for rank in range(world_size)]
    }


def wire_bytes(case: dict[str, Any], seed: int) -> np.ndarray:
    """A payload whose bodies are numbers of the wire dtype, whatever is between."""
    raw = case["payload"].copy()
    for row, span in enumerate(case["spans"]):
        body = numbers(seed + row, span["length"], case["wire_dtype"]).view(np.uint8)
        raw[span["body"] : span["body"] + body.size] = body
    return raw


@pytest.mark.parametrize("wire_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cast(compiled: Any, dtype: str, wire_dtype: str) -> None:
    for feedback in FEEDBACKS:
        case = cast_case(dtype, wire_dtype, LENGTHS, feedback)
        written = compare(compiled, "cast", **case)
        for scale in (1.0, 1 / 3):
            decoding = uncast_case(case, written["payload"])
            compare(compiled, "uncast", **decoding, scale=scale)
            compare(compiled, "uncast_add", **decoding, scale=scale)


@pytest.mark.parametrize("wire_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(compiled: Any, dtype: str, wire_dtype: str) -> None:
    case = cast_case(dtype, wire_dtype, list(range(2 * VECTOR + 2)), "committed")
    written = compare(compiled, "cast", **case)
    decoding = uncast_case(case, written["payload"])
    compare(compiled, "uncast", **decoding, scale=0.5)
    compare(compiled, "uncast_add", **decoding, scale=0.5)
    compare(compiled, "recast_sum", **sum_case(case, 2))


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_buffers(compiled: Any, dtype: str, shift: int) -> None:
    for wire_dtype in ("float16", "bfloat16", dtype):
        case = cast_case(dtype, wire_dtype, [3, 130], "two versions")
        written = compare(compiled, "cast", shift=shift, **case)
        decoding = uncast_case(case, written["payload"])
        compare(compiled, "uncast", shift=shift, **decoding)
        compare(compiled, "uncast_add", shift=shift, **decoding)
        compare(compiled, "recast_sum", shift=shift, **sum_case(case, 3))


@pytest.mark.parametrize("world_size", [*range(1, 9), 300])
@pytest.mark.parametrize("wire_dtype", DTYPES)
def test_recast_sum(compiled: Any, wire_dtype: str, world_size: int) -> None:
    dtype = DTYPES[world_size % 2]
    for feedback in FEEDBACKS:
        case = cast_case(dtype, wire_dtype, [1, 0, 129, 17], feedback)
        summing = sum_case(case, world_size)
        for wire_scale in (1.0, 2.0**-9):
            compare(compiled, "recast_sum", **summing, wire_scale=wire_scale)


@pytest.mark.parametrize("wire_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_values(compiled: Any, dtype: str, wire_dtype: str) -> None:
    """NaN, Inf and overflow at every place of a vector, between ordinary numbers."""
    case = cast_case(dtype, wire_dtype, [40 * len(SPECIAL), 5], "two versions")
    values = np.random.default_rng(3).standard_normal(len(case["input"]))
    values[3 : 3 + 40 * len(SPECIAL) : 40] = SPECIAL
    values[44 : 3 + 40 * len(SPECIAL) : 40] *= 1e-6
    case["input"] = encode(values, dtype)
    wire = {"payload": wire_dtype} if wire_dtype in ("float32", "float64") else {}
    for feedback in (case["residual"], None):
        case["residual"] = feedback
        if wire and feedback is None:
            wire = {}
        shifted = compare(compiled, "cast", **case)
        decoding = uncast_case(case, shifted["payload"])
        view = {"output": dtype}
        flagged = compare(compiled, "uncast", nan_view=view, **decoding)
        assert flagged["nonfinite"].tolist() == [1, 0]
        compare(compiled, "uncast_add", nan_view=view, **decoding)
        parts = {"parts": [shifted["payload"], case["payload"], shifted["payload"]]}
        compare(compiled, "recast_sum", **sum_case(case, 1) | parts)


def test_all_16_bit_patterns(compiled: Any) -> None:
    """Every fp16 and bf16 number, to every format and back."""
    for dtype in ("float16", "bfloat16"):
        patterns = np.arange(65536, dtype=np.uint16)
        for wire_dtype in DTYPES:
            case = cast_case(dtype, wire_dtype, [65536])
            case["input"] = np.concatenate([patterns[:3], patterns, patterns[:3]])
            view = {"payload": wire_dtype}
            case["spans"]["body"], case["payload"] = 0, np.zeros(65536 * 8, np.uint8)
            compare(compiled, "cast", nan_view=view, **case)


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_fp64_narrows_in_one_rounding(compiled: Any, wire_dtype: str) -> None:
    """Beside every midpoint, by less than fp32 can tell: two roundings would err."""
    patterns = decode(np.arange(65536, dtype=np.uint16), wire_dtype)
    finite = np.unique(patterns[np.isfinite(patterns)])
    middle = (finite[1:] + finite[:-1]) / 2
    data = np.concatenate([np.nextafter(middle, to) for to in (-np.inf, np.inf)])
    case = cast_case("float64", wire_dtype, [data.size])
    case["input"] = np.concatenate([data[:3], data, middle[:3]])
    written = compare(compiled, "cast", **case)
    start = int(case["spans"][0]["body"])
    sent = decode(written["payload"][start : start + 2 * data.size].copy(), wire_dtype)
    np.testing.assert_array_equal(sent, np.concatenate([finite[:-1], finite[1:]]))
