"""Quantisers behind a rotation: compiled against the reference, in bits."""

from __future__ import annotations

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
    format_body,
    make_spans,
    numbers,
    residuals,
)

from commkern import reference
from commkern.formats import Format
from commkern.spans import one_span

FORMATS = {
    "absmax, pieces in a block": (Format(bits=4, block_size=128, rotation=32), 1),
    "absmax, blocks in a piece": (Format(bits=8, block_size=64, rotation=512), 0),
    "absmax, as one": (Format(bits=3, block_size=256, rotation=256), 1),
    "l2 in 16 bits": (Format("symmetric", 4, 64, "float16", "l2", rotation=128), 1),
    "range": (Format("asymmetric", 5, 32, "bfloat16", "range", rotation=64), 0),
    "range of a span": (Format("asymmetric", 2, 64, "span", "range", rotation=32), 1),
    "mean of a span": (Format("sign", 1, 64, "span", "mean", rotation=1024), 0),
    "ternary": (Format("ternary", 2, 32, "e8m0", rotation=32), 1),
    "natural": (Format("natural", 5, 32, "e8m0", rotation=64), 1),
    "microscaling": (Format("float6_e3m2", 6, 32, "ocp", rotation=32), 0),
    "two-level": (Format("float4_e2m1", 4, 16, "e4m3", rotation=128), 0),
    "book": (Format("nf4", 4, 4096, rotation=4096), 0),
}
ROUNDINGS = ("nearest", "stochastic")


def case_of(name: str, dtype: str, lengths: list[int], feedback: str) -> dict[str, Any]:
    fmt, rounding = FORMATS[name]
    begins = [row % 3 * 5 * fmt.unit for row in range(len(lengths))]
    spans, elements, nbytes, count = make_spans(
        lengths, format_body(fmt, dtype), begins=begins, shuffle=True
    )
    versions: Any = None
    if feedback:
        versions = residuals(3, count, in_place=feedback == "in place")
    if feedback == "committed":
        versions = *versions, np.resize(np.array([1, 0, 1], np.uint8), len(lengths))
    return {
        "spans": spans,
        "input": numbers(1, elements, dtype),
        "dtype": dtype,
        "payload": filler(nbytes),
        "residual": versions,
        **vars_of(fmt),
        "rounding": ROUNDINGS[rounding],
        "seed": 0x0123456789ABCDEF,
        "step": 7,
        "stream": 0x01020003,
    }


def vars_of(fmt: Format) -> dict[str, Any]:
    fields = (
        "code",
        "bits",
        "block_size",
        "scales",
        "statistic",
        "constant",
        "rotation",
    )
    return {field: getattr(fmt, field) for field in fields}


def decoding_of(case: dict[str, Any], payload: np.ndarray) -> dict[str, Any]:
    fields = [name for name in case if name in reference.dequantize.fields]
    return {name: case[name] for name in fields} | {
        "payload": payload,
        "output": numbers(2, len(case["input"]), case["dtype"]),
        "nonfinite": np.zeros(len(case["spans"]), np.uint8),
    }


def summing_of(case: dict[str, Any], count: int) -> dict[str, Any]:
    parts = []
    for rank in range(count):
        one = case | {"payload": case["payload"].copy(), "residual": None}
        one["input"] = numbers(10 + rank, len(case["input"]), case["dtype"])
        reference.quantize(**one | {"stream": rank})
        parts.append(one["payload"])
    summing = {name: case[name] for name in case if name != "input"}
    return summing | {"parts": parts}


def lengths_of(name: str) -> list[int]:
    unit = FORMATS[name][0].unit
    return [0, 1, 37, unit - 1, unit, 3 * unit + 77, 131]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_quantize(compiled: Any, name: str, dtype: str) -> None:
    for feedback in ("", "in place", "two versions", "committed"):
        case = case_of(name, dtype, lengths_of(name), feedback)
        compare(compiled, "quantize", **case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize(compiled: Any, name: str, dtype: str) -> None:
    case = case_of(name, dtype, lengths_of(name), "")
    reference.quantize(**case)
    decoding = decoding_of(case, case["payload"])
    for kernel in ("dequantize", "dequantize_add"):
        compare(compiled, kernel, **decoding, scale=1 / 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FORMATS)
def test_requantize_sum(compiled: Any, name: str, dtype: str) -> None:
    for feedback in ("", "two versions", "committed"):
        case = case_of(name, dtype, lengths_of(name), feedback)
        compare(compiled, "requantize_sum", **summing_of(case, 3))


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("name", ["absmax, pieces in a block", "two-level"])
def test_misaligned_buffers(compiled: Any, name: str, shift: int) -> None:
    case = case_of(name, "float32", [300, 7, 1029], "two versions")
    written = compare(compiled, "quantize", shift=shift, **case)
    decoding = decoding_of(case, written["payload"])
    compare(compiled, "dequantize", shift=shift, **decoding)
    compare(compiled, "requantize_sum", shift=shift, **summing_of(case, 2))


@pytest.mark.parametrize("name", FORMATS)
def test_values_at_the_ends_of_the_range(compiled: Any, name: str) -> None:
    """Pieces that overflow, and NaN, Inf and denormals: residuals stay finite."""
    special = [3.4e38, -3.4e38, 2e38, np.nan, np.inf, -np.inf, 1e-45, 0.0]
    case = case_of(name, "float32", [5 * FORMATS[name][0].unit + 77], "two versions")
    random = np.random.default_rng(4)
    where = random.random(len(case["input"])) < 0.002
    case["input"][where] = random.choice(np.float32(special), where.sum())
    written = compare(compiled, "quantize", **case)
    assert np.isfinite(written["residual"][1]).all()
    decoding = decoding_of(case, written["payload"])
    view = {"output": "float32"}
    compare(compiled, "dequantize", nan_view=view, **decoding)
    summing = summing_of(case, 2) | {"parts": [written["payload"]] * 2}
    written = compare(compiled, "requantize_sum", **summing)
    assert np.isfinite(written["residual"][1]).all()


def test_all_parameters_and_seeds_turn_alike(implementation: Any) -> None:
    """A payload decodes from its bytes: rounding is keyed, the rotation is not."""
    fmt = Format(bits=8, block_size=64, rotation=64)
    values = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    payloads = []
    for seed, parameter_id in ((0, 0), (5, 9)):
        payload = np.zeros(fmt.body_nbytes(200, "float32"), np.uint8)
        implementation.quantize(
            spans=one_span(200, parameter_id=parameter_id),
            input=values,
            dtype="float32",
            payload=payload,
            seed=seed,
            **vars_of(fmt),
        )
        payloads.append(payload.tobytes())
    assert payloads[0] == payloads[1]


def test_one_large_value_costs_its_block_little(implementation: Any) -> None:
    """What a rotation is for: the scale of a block need not cover one outlier."""
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    values[::128] = 100.0
    errors = []
    for rotation in (0, 128):
        fmt = Format(bits=4, block_size=128, rotation=rotation)
        spans, payload = one_span(4096), np.zeros(4096, np.uint8)
        common = {"spans": spans, "dtype": "float32", "payload": payload} | vars_of(fmt)
        implementation.quantize(input=values, **common)
        output = np.zeros(4096, np.float32)
        implementation.dequantize(output=output, **common)
        errors.append(np.square(decode(output, "float32") - values).mean())
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(implementation: Any, dtype: str) -> None:
    fmt = Format(bits=4, block_size=64, rotation=128)
    zeros, output = encode(np.zeros(300), dtype), encode(np.ones(300), dtype)
    payload = filler(fmt.body_nbytes(300, dtype))
    common = {"spans": one_span(300), "dtype": dtype, "payload": payload}
    implementation.quantize(input=zeros, **common, **vars_of(fmt))
    implementation.dequantize(output=output, **common, **vars_of(fmt))
    np.testing.assert_array_equal(decode(output, dtype), 0)
