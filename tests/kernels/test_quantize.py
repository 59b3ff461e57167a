"""Compiled block quantisers against the reference, in bits."""

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
    make_spans,
    numbers,
    quantize_body,
    residuals,
)
from tests.tolerances import UNIT_ROUNDOFF

from commkern import reference
from commkern.reference.numerics import FORMATS

BITS = (4, 8)
BLOCK_SIZES = (16, 24, 32, 128, 8192)
ROUNDINGS = ("nearest", "stochastic")
FEEDBACKS = ("none", "in place", "two versions", "committed")
LARGEST = {
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}
VECTOR = 64  # elements, of the widest loop over fp32


def lengths_around(block_size: int) -> list[int]:
    if block_size > 1000:
        return [block_size - 1, block_size, block_size + 1, 0, 3]
    return [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 5, 257]


def feedback_of(kind: str, count: int, parameters: int) -> Any:
    if kind == "none":
        return None
    versions = residuals(3, count, in_place=kind == "in place")
    if kind != "committed":
        return versions
    return *versions, np.resize(np.array([1, 0, 1, 1], np.uint8), parameters)


def quantize_case(
    dtype: str,
    bits: int,
    block_size: int,
    lengths: list[int],
    feedback: str = "none",
    **settings: Any,
) -> dict[str, Any]:
    spans, elements, nbytes, count = make_spans(
        lengths,
        quantize_body(bits, block_size, dtype),
        begins=[row % 3 * 5 * block_size for row in range(len(lengths))],
        shuffle=True,
    )
    return {
        "spans": spans,
        "input": numbers(1, elements, dtype),
        "dtype": dtype,
        "payload": filler(nbytes),
        "residual": feedback_of(feedback, count, len(lengths)),
        "bits": bits,
        "block_size": block_size,
        "seed": 0x0123456789ABCDEF,
        "step": 0xFFFFFFFF,
        "stream": 0x01020003,
    } | settings


def decode_case(case: dict[str, Any], payload: np.ndarray) -> dict[str, Any]:
    """Arguments that decode what a quantize case wrote."""
    fields = ("spans", "dtype", "bits", "block_size")
    output = numbers(2, len(case["input"]), case["dtype"])
    return {name: case[name] for name in fields} | {
        "payload": payload,
        "output": output,
        "nonfinite": np.zeros(len(case["spans"]), np.uint8),
    }


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(
    compiled: Any, dtype: str, bits: int, block_size: int, rounding: str
) -> None:
    lengths = lengths_around(block_size)
    for feedback in FEEDBACKS:
        case = quantize_case(dtype, bits, block_size, lengths, feedback)
        compare(compiled, "quantize", **case, rounding=rounding)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length_quantized(compiled: Any, dtype: str, bits: int) -> None:
    lengths = list(range(2 * VECTOR + 2))
    case = quantize_case(dtype, bits, 32, lengths, "committed", rounding="stochastic")
    written = compare(compiled, "quantize", **case)
    for kernel in ("dequantize", "dequantize_add"):
        decoding = decode_case(case, written["payload"])
        compare(compiled, kernel, **decoding, scale=1 / 3)


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_buffers(compiled: Any, dtype: str, shift: int) -> None:
    case = quantize_case(dtype, 4, 24, [71, 24, 149], "two versions")
    written = compare(compiled, "quantize", shift=shift, **case)
    decoding = decode_case(case, written["payload"])
    compare(compiled, "dequantize", shift=shift, **decoding)
    compare(compiled, "dequantize_add", shift=shift, **decoding)
    compare(compiled, "requantize_sum", shift=shift, **sum_case(case, 3))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(compiled: Any, dtype: str, bits: int, block_size: int) -> None:
    case = quantize_case(dtype, bits, block_size, lengths_around(block_size))
    reference.quantize(**case)
    for scale in (1.0, 1 / 3, -0.7):
        decoding = decode_case(case, case["payload"])
        compare(compiled, "dequantize", **decoding, scale=scale)
        compare(compiled, "dequantize_add", **decoding, scale=scale)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_takes_any_bytes(compiled: Any, dtype: str, bits: int) -> None:
    """Payloads are untrusted: every code, every scale, NaN and Inf among them."""
    case = quantize_case(dtype, bits, 16, [16 * 64, 333])
    payload = np.random.default_rng(5).bytes(case["payload"].size)
    decoding = decode_case(case, np.frombuffer(payload, np.uint8))
    for kernel in ("dequantize", "dequantize_add"):
        compare(compiled, kernel, nan_view={"output": dtype}, **decoding)


def sum_case(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    """requantize_sum's arguments: one coded part a rank, then the owner's turn."""
    parts = []
    for rank in range(world_size):
        part = case | {
            "input": numbers(10 + rank, len(case["input"]), case["dtype"]),
            "payload": case["payload"].copy(),
            "residual": None,
            "stream": 0x01000000 + rank,
        }
        reference.quantize(**part)
        parts.append(part["payload"])
    fields = ("spans", "dtype", "residual", "bits", "block_size", "seed", "step")
    return {name: case[name] for name in fields} | {
        "parts": parts,
        "payload": case["payload"],
        "stream": 0x0100FFFF,
        "rounding": case.get("rounding", "nearest"),
    }


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_requantize_sum(compiled: Any, dtype: str, bits: int, world_size: int) -> None:
    for feedback, rounding in (
        ("none", "stochastic"),
        ("in place", "nearest"),
        ("two versions", "stochastic"),
        ("committed", "nearest"),
    ):
        lengths = lengths_around(24)
        case = quantize_case(dtype, bits, 24, lengths, feedback, rounding=rounding)
        compare(compiled, "requantize_sum", **sum_case(case, world_size))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_requantize_sum_blocks(compiled: Any, dtype: str, block_size: int) -> None:
    for rounding in ROUNDINGS:
        lengths = lengths_around(block_size)
        case = quantize_case(dtype, 8, block_size, lengths, "committed")
        case["rounding"] = rounding
        compare(compiled, "requantize_sum", **sum_case(case, 2))


def test_requantize_sum_of_300_ranks(compiled: Any) -> None:
    case = quantize_case("float32", 8, 128, [1000], "two versions")
    few = sum_case(case, 5)
    few["parts"] = [few["parts"][rank % 5] for rank in range(300)]
    compare(compiled, "requantize_sum", **few)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_values(compiled: Any, dtype: str, bits: int, rounding: str) -> None:
    """Blocks of every kind of number: NaN, Inf, denormals, the largest, zeros, ties."""
    block_size, random = 32, np.random.default_rng(11)
    top = LARGEST[dtype]
    step = UNIT_ROUNDOFF[FORMATS[dtype].compute.name]
    tops = [top * (1 - k * step) for k in range(9)]
    blocks = []
    for peak in (1e-45, 1e-42, 3e-39, 1e-38, 2e-31, 1e-30, 1e-6, 1.0, *tops):
        values = random.uniform(-1, 1, block_size) * peak
        values[random.integers(block_size)] = peak
        blocks += [values, -values]
    blocks += [np.zeros(block_size), np.full(block_size, -0.0)]
    for special in (np.nan, np.inf, -np.inf):
        for place in (0, 13, block_size - 1):
            values = random.standard_normal(block_size)
            values[place] = special
            blocks += [values, random.standard_normal(block_size)]
    data = encode(np.concatenate([*blocks, random.standard_normal(21)]), dtype)
    for feedback in FEEDBACKS:
        case = quantize_case(dtype, bits, block_size, [data.size], feedback)
        case["input"] = np.concatenate([data[:3], data])
        case["rounding"] = rounding
        written = compare(compiled, "quantize", **case)
        decoding = decode_case(case, written["payload"])
        view = {"output": dtype}
        flagged = compare(compiled, "dequantize", nan_view=view, **decoding)
        assert flagged["nonfinite"].tolist() == [1]
        compare(compiled, "dequantize_add", nan_view=view, **decoding)
        parts = {"parts": [written["payload"], written["payload"]]}
        compare(compiled, "requantize_sum", **sum_case(case, 1) | parts)


def test_draws_wrap_at_32_bits(compiled: Any) -> None:
    """Far into a parameter: the counter word is the draw modulo 2^32."""
    case = quantize_case("float32", 8, 16, [700, 700], rounding="stochastic")
    case["spans"]["begin"] = [(2**32 - 3) * 16, 2**58]
    compare(compiled, "quantize", **case)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_pieces_equal_the_whole(implementation: Any, rounding: str) -> None:
    """Bits are a function of (parameter, offset, step), not of how spans are cut."""
    block_size, length = 24, 24 * 9 + 7
    whole = quantize_case("float32", 4, block_size, [length], rounding=rounding)
    whole["spans"]["begin"] = 0
    implementation.quantize(**whole)
    pieces = quantize_case("float32", 4, block_size, [96, 24, length - 120])
    pieces["rounding"], spans = rounding, pieces["spans"]
    spans["begin"], spans["parameter_id"] = [0, 96, 120], whole["spans"]["parameter_id"]
    source = whole["input"][3 : 3 + length]
    for span in spans:
        at, begin = span["offset"], span["begin"]
        pieces["input"][at : at + span["length"]] = source[begin:][: span["length"]]
    implementation.quantize(**pieces)
    values = [decoded(implementation, case) for case in (whole, pieces)]
    joined = np.concatenate(
        [values[1][s["offset"] : s["offset"] + s["length"]] for s in spans]
    )
    np.testing.assert_array_equal(joined, values[0][3 : 3 + length])


def decoded(implementation: Any, case: dict[str, Any]) -> np.ndarray:
    decoding = decode_case(case, case["payload"])
    implementation.dequantize(**decoding)
    return decode(decoding["output"], case["dtype"])
