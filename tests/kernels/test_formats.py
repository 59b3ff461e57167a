"""Every format of the block quantisers, compiled against the reference, in bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import (
    DTYPES,
    compare,
    encode,
    filler,
    format_body,
    make_spans,
    numbers,
)
from tests.kernels.test_quantize import LARGEST, feedback_of, lengths_around

from commkern import reference
from commkern.formats import CODES, ROUNDINGS, Format
from commkern.reference import codes


def formats() -> Iterator[Format]:
    """Every width of every code, then every scale and statistic at one width."""
    for code, allowed in CODES.items():
        least, most = allowed.bits
        scales, statistic = allowed.scales[0], allowed.statistics[0]
        size = 32 if scales == "span" else 40
        for bits in range(least, most + 1):
            yield Format(code, bits, size, scales, statistic, 0.75)
        for scales in allowed.scales[1:]:
            for statistic in allowed.statistics:
                size = 32 if scales == "span" else 136
                fmt = Format(code, most, size, scales, statistic, 0.75)
                if roundings(fmt):
                    yield fmt


def roundings(fmt: Format) -> list[str]:
    """The roundings that `fmt` may be made with, if it is a format."""
    found = []
    for rounding in ROUNDINGS:
        try:
            fmt.check(rounding)
        except ValueError:
            continue
        found.append(rounding)
    return found


def name_of(fmt: Format) -> str:
    return f"{fmt.code}-{fmt.bits}-{fmt.scales}-{fmt.statistic}"


every_format = pytest.mark.parametrize("fmt", list(formats()), ids=name_of)


def format_case(
    fmt: Format, dtype: str, lengths: list[int], feedback: str = "none"
) -> dict[str, Any]:
    alignment = fmt.alignment(dtype)
    spans, elements, nbytes, count = make_spans(
        lengths,
        format_body(fmt, dtype),
        begins=[row % 3 * 5 * fmt.block_size for row in range(len(lengths))],
        body_gap=alignment + 3,
        shuffle=True,
    )
    return {
        "spans": spans,
        "input": numbers(1, elements, dtype),
        "dtype": dtype,
        "payload": filler(nbytes),
        "residual": feedback_of(feedback, count, len(lengths)),
        "seed": 0x0123456789ABCDEF,
        "step": 77,
        "stream": 0x01020003,
        "rounding": roundings(fmt)[0],
    } | fmt.fields()


def decoding_case(fmt: Format, case: dict[str, Any], payload: Any) -> dict[str, Any]:
    return {
        "spans": case["spans"],
        "dtype": case["dtype"],
        "payload": payload,
        "output": numbers(2, len(case["input"]), case["dtype"]),
        "nonfinite": np.zeros(len(case["spans"]), np.uint8),
    } | fmt.fields()


def summing_case(fmt: Format, case: dict[str, Any], parts: int) -> dict[str, Any]:
    """The owner's turn after `parts` ranks have coded numbers of their own."""
    payloads = []
    for rank in range(parts):
        part = case | {
            "input": numbers(10 + rank, len(case["input"]), case["dtype"]),
            "payload": case["payload"].copy(),
            "residual": None,
            "stream": 0x01000000 + rank,
        }
        reference.quantize(**part)
        payloads.append(part["payload"])
    kept = ("spans", "dtype", "residual", "seed", "step", "rounding")
    return (
        {name: case[name] for name in kept}
        | fmt.fields()
        | {
            "parts": payloads,
            "payload": case["payload"],
            "stream": 0x0100FFFF,
        }
    )


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_values(compiled: Any, fmt: Format, dtype: str) -> None:
    for rounding in roundings(fmt):
        for feedback in ("none", "committed"):
            case = format_case(fmt, dtype, lengths_around(fmt.block_size), feedback)
            case["rounding"] = rounding
            written = compare(compiled, "quantize", **case)
        decoding = decoding_case(fmt, case, written["payload"])
        compare(compiled, "dequantize", **decoding, scale=1 / 3)
        compare(compiled, "dequantize_add", **decoding)


@every_format
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums(compiled: Any, fmt: Format, dtype: str) -> None:
    for feedback in ("none", "two versions"):
        case = format_case(fmt, dtype, lengths_around(fmt.block_size), feedback)
        case["rounding"] = roundings(fmt)[-1]
        compare(compiled, "requantize_sum", **summing_case(fmt, case, 3))


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_decode(compiled: Any, fmt: Format, dtype: str) -> None:
    case = format_case(fmt, dtype, [fmt.block_size * 9, 333])
    payload = np.random.default_rng(5).bytes(case["payload"].size)
    decoding = decoding_case(fmt, case, np.frombuffer(payload, np.uint8))
    for kernel in ("dequantize", "dequantize_add"):
        compare(compiled, kernel, nan_view={"output": dtype}, **decoding)


def awkward_blocks(fmt: Format, dtype: str) -> list[np.ndarray]:
    """Spans of every kind of number: denormals, the largest, zeros, NaN, Inf."""
    random, size, top = np.random.default_rng(11), fmt.block_size, LARGEST[dtype]
    smallest = 5e-324 if dtype == "float64" else 1e-45
    blocks = [np.zeros(size), np.full(size, -0.0), np.full(size, top)]
    for peak in (smallest, 1e-42, 3e-39, 1e-38, 2e-31, 1e-6, 1.0, 3e9, top / 3, top):
        values = random.uniform(-1, 1, size) * peak
        values[random.integers(size)] = peak
        blocks += [
            values,
            -np.abs(values),
            values * 2.0 ** -random.integers(0, 30, size),
        ]
    for special in (np.nan, np.inf, -np.inf):
        values = random.standard_normal(size)
        values[random.integers(size)] = special
        blocks.append(values)
    tail = random.standard_normal(21)
    if fmt.scales == "span":
        return [
            np.concatenate([block, block[::-1], tail * block[0]]) for block in blocks
        ]
    return [np.concatenate([*blocks, tail])]


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
def test_awkward_values(compiled: Any, fmt: Format, dtype: str) -> None:
    for values in awkward_blocks(fmt, dtype):
        data = encode(values, dtype)
        for rounding in roundings(fmt):
            case = format_case(fmt, dtype, [data.size], "two versions")
            case["input"] = np.concatenate([data[:3], data])
            case["rounding"] = rounding
            written = compare(compiled, "quantize", **case)
            decoding = decoding_case(fmt, case, written["payload"])
            view = {"output": dtype}
            compare(compiled, "dequantize", nan_view=view, **decoding)
            parts = {"parts": [written["payload"], written["payload"]]}
            compare(compiled, "requantize_sum", **summing_case(fmt, case, 1) | parts)


def values_and_ties(fmt: Format) -> np.ndarray:
    """Every value of a code, every midpoint, and the fp32 numbers beside them."""
    stored = np.arange(1 << fmt.bits)
    if fmt.code == "symmetric":
        stored -= 1 << (fmt.bits - 1)
    values = codes.decode(stored, fmt, np.dtype(np.float32)).astype(np.float64)
    values = np.unique(values[np.abs(values) <= fmt.largest])
    middle = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    sides = [np.nextafter(middle, np.float32(to)) for to in (-np.inf, np.inf)]
    return np.clip(np.concatenate([middle, *sides]), -fmt.largest, fmt.largest)


ABSMAX = [f for f in formats() if (f.scales, f.statistic) == ("compute", "absmax")]


@pytest.mark.parametrize("fmt", ABSMAX, ids=name_of)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties(compiled: Any, fmt: Format, dtype: str) -> None:
    """Blocks whose scale is 1, so that every value is its own position."""
    values = values_and_ties(fmt)
    length = -(-values.size // (fmt.block_size - 1)) * (fmt.block_size - 1)
    blocks = np.resize(values, length).reshape(-1, fmt.block_size - 1)
    blocks = np.insert(blocks, 0, fmt.largest, axis=1)
    case = format_case(fmt, dtype, [blocks.size])
    case["input"] = np.pad(encode(blocks.reshape(-1), dtype), (3, 3))
    written = compare(compiled, "quantize", **case)
    compare(compiled, "dequantize", **decoding_case(fmt, case, written["payload"]))
