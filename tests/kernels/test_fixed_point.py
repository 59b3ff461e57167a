"""Compiled block fixed point against the reference in bits, and against integers."""

from __future__ import annotations

import itertools
from fractions import Fraction
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
from tests.kernels.test_quantize import FEEDBACKS, LARGEST, feedback_of, lengths_around

from commkern import reference
from commkern.reference.fixed_point import _exponents_of
from commkern.reference.numerics import FORMATS

BITS = (8, 16, 32)
BLOCK_SIZES = (16, 24, 256, 8192)
ROUNDINGS = ("nearest", "stochastic")
VECTOR = 64
WORDS = {8: np.int8, 16: np.int16, 32: np.int32}


def exponent_bytes(length: int, block_size: int, dtype: str) -> int:
    return _exponents_of(FORMATS[dtype]).nbytes(length, block_size)


def fixed_case(
    dtype: str,
    bits: int,
    block_size: int,
    lengths: list[int],
    feedback: str = "none",
    **settings: Any,
) -> dict[str, Any]:
    """fixed_quantize's arguments, the exponents being those of its own input."""
    spans, elements, nbytes, count = make_spans(
        lengths,
        lambda length: length * bits // 8,
        begins=[row % 3 * 5 * block_size for row in range(len(lengths))],
        shuffle=True,
    )
    spans["earlier"] = 3 + np.cumsum(
        [0, *(2 + exponent_bytes(n, block_size, dtype) for n in lengths[:-1])]
    )
    agreed = int(spans["earlier"][-1]) + exponent_bytes(lengths[-1], block_size, dtype)
    case = {
        "spans": spans,
        "input": numbers(1, elements, dtype),
        "dtype": dtype,
        "exponents": filler(agreed),
        "payload": filler(nbytes),
        "residual": feedback_of(feedback, count, len(lengths)),
        "bits": bits,
        "block_size": block_size,
        "digits": bits - 1,
        "largest": 2 ** (bits - 1) - 1,
        "rounding": "nearest",
        "seed": 0x0123456789ABCDEF,
        "step": 0xFFFFFFFF,
        "stream": 0x01020003,
    } | settings
    reference.block_exponents(**exponents_case(case))
    return case


def exponents_case(case: dict[str, Any]) -> dict[str, Any]:
    """block_exponents' arguments; writes the case's exponents."""
    spans = case["spans"].copy()
    spans["body"] = spans["earlier"]
    fields = ("input", "dtype", "residual", "block_size")
    return {name: case[name] for name in fields} | {
        "spans": spans,
        "payload": case["exponents"],
    }


def max_case(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    """max_exponents' arguments, over random bytes."""
    random = np.random.default_rng(world_size)
    size = case["exponents"].size
    parts = [np.frombuffer(random.bytes(size), np.uint8) for _ in range(world_size)]
    arguments = exponents_case(case)
    fields = ("spans", "dtype", "payload", "block_size")
    return {name: arguments[name] for name in fields} | {"parts": parts}


def sum_case(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    """fixed_sum's arguments, over random bytes."""
    random = np.random.default_rng(world_size)
    size = case["payload"].size
    parts = [np.frombuffer(random.bytes(size), np.uint8) for _ in range(world_size)]
    fields = ("spans", "bits", "payload")
    return {name: case[name] for name in fields} | {"parts": parts}


def decode_case(case: dict[str, Any], payload: np.ndarray) -> dict[str, Any]:
    """Arguments that decode what a case wrote: codes, then the exponents."""
    spans = case["spans"].copy()
    spans["earlier"] += payload.size
    fields = ("dtype", "bits", "block_size", "digits")
    return {name: case[name] for name in fields} | {
        "spans": spans,
        "payload": np.concatenate([payload, case["exponents"]]),
        "output": numbers(2, len(case["input"]), case["dtype"]),
        "nonfinite": np.zeros(len(spans), np.uint8),
    }


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_exponents(compiled: Any, dtype: str, block_size: int) -> None:
    for feedback, shift in zip(FEEDBACKS, (*MISALIGNMENTS, 1), strict=True):
        case = fixed_case(dtype, 8, block_size, lengths_around(block_size), feedback)
        compare(compiled, "block_exponents", shift=shift, **exponents_case(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponents_are_those_of_the_largest_magnitude(
    implementation: Any, dtype: str
) -> None:
    case = fixed_case(dtype, 8, 16, [16 * 40])
    random = np.random.default_rng(3)
    values = random.uniform(-1, 1, (40, 16)) * 2.0 ** random.integers(-20, 16, (40, 1))
    values[7] = 0
    case["input"][3:643] = encode(values.reshape(-1), dtype)
    implementation.block_exponents(**exponents_case(case))
    kind = _exponents_of(FORMATS[dtype])
    got = kind.read(case["exponents"], 3, 640, 16) - (kind.bias - 1)
    absmax = np.abs(decode(case["input"][3:643], dtype)).reshape(40, 16).max(axis=1)
    expected = np.where(absmax == 0, 1 - kind.bias, np.frexp(absmax)[1])
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_max_exponents(compiled: Any, dtype: str, world_size: int) -> None:
    case = fixed_case(dtype, 8, 16, [0, 1, 16, 700, 16 * VECTOR * 3 + 5])
    for shift in MISALIGNMENTS:
        compare(compiled, "max_exponents", shift=shift, **max_case(case, world_size))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_quantize(
    compiled: Any, dtype: str, bits: int, block_size: int, rounding: str
) -> None:
    lengths = lengths_around(block_size)
    for feedback, ranks in zip(FEEDBACKS, (1, 2, 3, 8), strict=True):
        case = fixed_case(dtype, bits, block_size, lengths, feedback, rounding=rounding)
        case["largest"] //= ranks
        case["digits"] = (case["largest"] + 1).bit_length() - 1
        compare(compiled, "fixed_quantize", **case)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(compiled: Any, dtype: str, bits: int) -> None:
    lengths = list(range(2 * VECTOR + 2))
    case = fixed_case(dtype, bits, 32, lengths, "committed", rounding="stochastic")
    written = compare(compiled, "fixed_quantize", **case)
    for kernel in ("fixed_dequantize", "fixed_dequantize_add"):
        decoding = decode_case(case, written["payload"])
        compare(compiled, kernel, **decoding, scale=1 / 3)
    compare(compiled, "fixed_sum", **sum_case(case, 3))


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_buffers(compiled: Any, dtype: str, bits: int, shift: int) -> None:
    case = fixed_case(dtype, bits, 24, [71, 24, 149], "two versions")
    written = compare(compiled, "fixed_quantize", shift=shift, **case)
    decoding = decode_case(case, written["payload"])
    compare(compiled, "fixed_dequantize", shift=shift, **decoding)
    compare(compiled, "fixed_dequantize_add", shift=shift, **decoding)
    compare(compiled, "fixed_sum", shift=shift, **sum_case(case, 3))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_dequantize(
    compiled: Any, dtype: str, bits: int, block_size: int
) -> None:
    case = fixed_case(dtype, bits, block_size, lengths_around(block_size))
    reference.fixed_quantize(**case)
    for scale in (1.0, 1 / 3, -0.7):
        decoding = decode_case(case, case["payload"])
        compare(compiled, "fixed_dequantize", **decoding, scale=scale)
        compare(compiled, "fixed_dequantize_add", **decoding, scale=scale)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_dequantize_takes_any_bytes(compiled: Any, dtype: str, bits: int) -> None:
    """Payloads are untrusted: every code, every exponent."""
    case = fixed_case(dtype, bits, 16, [16 * 300, 333])
    decoding = decode_case(case, case["payload"])
    size = decoding["payload"].size
    random = np.random.default_rng(5).bytes(size)
    decoding["payload"] = np.frombuffer(random, np.uint8)
    for kernel in ("fixed_dequantize", "fixed_dequantize_add"):
        compare(compiled, kernel, nan_view={"output": dtype}, **decoding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exponents_that_do_not_fit_the_data(
    compiled: Any, dtype: str, bits: int, rounding: str
) -> None:
    """A peer may send any exponents: codes stay in range, whatever the data hold."""
    case = fixed_case(dtype, bits, 16, [16 * 300], "two versions", rounding=rounding)
    case["largest"] //= 3
    random = np.random.default_rng(6).bytes(case["exponents"].size)
    case["exponents"] = np.frombuffer(random, np.uint8)
    case["input"][5:900:40] = encode(np.array([np.nan]), dtype)
    case["input"][25:900:40] = encode(np.array([-np.inf]), dtype)
    written = compare(compiled, "fixed_quantize", **case)
    codes = written["payload"][5 : 5 + 4800 * bits // 8].view(WORDS[bits])
    assert np.abs(codes.astype(np.int64)).max() <= case["largest"]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("bits", BITS)
def test_fixed_sum(compiled: Any, bits: int, world_size: int) -> None:
    case = fixed_case("float32", bits, 16, [0, 1, 16, 700, 4096, 16 * VECTOR * 9 + 5])
    for shift in MISALIGNMENTS:
        compare(compiled, "fixed_sum", shift=shift, **sum_case(case, world_size))


@pytest.mark.parametrize("bits", BITS)
def test_sums_are_those_of_integers_in_any_order(
    implementation: Any, bits: int
) -> None:
    ranks, numel = 4, 1000
    case = fixed_case("float32", bits, 16, [numel])
    largest = (2 ** (bits - 1) - 1) // ranks
    random = np.random.default_rng(bits)
    values = random.integers(-largest, largest, (ranks, numel), endpoint=True)
    values[:, 0], values[:, 1] = largest, -largest
    sent = values.astype(WORDS[bits])
    expected = [sum(map(int, column)) for column in sent.T]
    arguments = sum_case(case, ranks)
    arguments["spans"]["body"] = 0
    for order in itertools.permutations(range(ranks)):
        arguments["parts"] = [sent[rank] for rank in order]
        implementation.fixed_sum(**arguments)
        got = arguments["payload"][: numel * bits // 8].view(WORDS[bits])
        assert got.tolist() == expected


def exact_code(value: float, step: Fraction, largest: int) -> int:
    """The nearest multiple of ``step`` (ties to even), in exact arithmetic."""
    return max(-largest, min(largest, round(Fraction(value) / step)))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_in_exact_arithmetic(
    implementation: Any, dtype: str, bits: int
) -> None:
    """Scales are powers of two, so nothing rounds but the code (and denormals are
    codes themselves): the error that is left is exact, too."""
    peaks = [
        2.0**-140,
        1e-38,
        2e-31,
        3e-5,
        1.0,
        0.999999,
        65504.0,
        1e38,
        LARGEST[dtype],
    ]
    random = np.random.default_rng(1)
    rows = [random.uniform(-1, 1, 16) * min(p, LARGEST[dtype]) for p in peaks]
    for row, peak in zip(rows, peaks, strict=True):
        row[3], row[4], row[5] = min(peak, LARGEST[dtype]), row[4] * 2**-9, 0.0
    case = fixed_case(dtype, bits, 16, [16 * len(rows)], "two versions")
    case["input"][3:] = 0
    case["input"][3 : 3 + 16 * len(rows)] = encode(np.concatenate(rows), dtype)
    case["residual"][0][:] = 0
    case["largest"] //= 3
    case["digits"] = (case["largest"] + 1).bit_length() - 1
    implementation.block_exponents(**exponents_case(case))
    implementation.fixed_quantize(**case)
    values = decode(case["input"], dtype)[3 : 3 + 16 * len(rows)]
    body, left = case["spans"]["body"][0], case["residual"][1]
    codes = case["payload"][body : body + values.size * bits // 8].view(WORDS[bits])
    kind = _exponents_of(FORMATS[dtype])
    exponents = kind.read(case["exponents"], 3, values.size, 16)
    for index, value in enumerate(values.tolist()):
        exponent = int(exponents[index // 16])
        power = exponent + 1 - kind.bias - case["digits"]
        step = Fraction(2) ** max(power, 1 - kind.bias - kind.fraction_bits)
        top = min(case["largest"], 2 ** case["digits"] - 1)
        highest = kind.bias + int(np.frexp(LARGEST[dtype])[1]) - 1
        most = top if exponent == highest else case["largest"]
        code = exact_code(value, step, most)
        assert codes[index] == code, (index, value)
        with np.errstate(over="ignore"):
            error = np.float32(float(Fraction(value) - code * step))
        if np.isfinite(error):  # fp64 errors may not fit
            assert left[case["spans"]["residual"][0] + index] == error


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_values(compiled: Any, dtype: str, bits: int, rounding: str) -> None:
    """Blocks of every kind of number: NaN, Inf, denormals, the largest, zeros, ties."""
    block_size, random = 32, np.random.default_rng(11)
    blocks = []
    for peak in (1e-45, 1e-42, 3e-39, 1e-38, 2e-31, 1e-30, 1e-6, 1.0, LARGEST[dtype]):
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
        case = fixed_case(dtype, bits, block_size, [data.size], feedback)
        case["input"] = np.concatenate([data[:3], data])
        case["rounding"] = rounding
        compare(compiled, "block_exponents", **exponents_case(case))
        reference.block_exponents(**exponents_case(case))
        written = compare(compiled, "fixed_quantize", **case)
        decoding = decode_case(case, written["payload"])
        view = {"output": dtype}
        flagged = compare(compiled, "fixed_dequantize", nan_view=view, **decoding)
        assert flagged["nonfinite"].tolist() == [1]
        whole = decode(flagged["output"], dtype)[3:]
        bad = np.repeat(["nan" in str(b) or "inf" in str(b) for b in blocks], 32)
        assert np.isnan(whole[: bad.size][bad]).all()
        assert np.isfinite(whole[: bad.size][~bad]).all()
        compare(compiled, "fixed_dequantize_add", nan_view=view, **decoding)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sum_that_overflows_is_flagged(implementation: Any, dtype: str) -> None:
    case = fixed_case(dtype, 8, 16, [16, 40])
    case["input"][3:19] = encode(np.full(16, LARGEST[dtype]), dtype)
    case["digits"], case["largest"] = 6, 63
    implementation.block_exponents(**exponents_case(case))
    implementation.fixed_quantize(**case)
    summing = sum_case(case, 2) | {"parts": [case["payload"].copy()] * 2}
    implementation.fixed_sum(**summing)
    decoding = decode_case(case, case["payload"])
    implementation.fixed_dequantize(**decoding, scale=0.5)
    assert decoding["nonfinite"].tolist() == [0, 0]
    implementation.fixed_dequantize(**decoding)
    assert decoding["nonfinite"].tolist() == [1, 0]
    assert np.isinf(decode(decoding["output"], dtype)[3:19]).all()


def test_draws_wrap_at_32_bits(compiled: Any) -> None:
    """Far into a parameter: the counter word is the draw modulo 2^32."""
    case = fixed_case("float32", 8, 16, [700, 700], rounding="stochastic")
    case["spans"]["begin"] = [(2**32 - 3) * 16, 2**58]
    compare(compiled, "fixed_quantize", **case)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_pieces_equal_the_whole(implementation: Any, rounding: str) -> None:
    """Bits are a function of (parameter, offset, step), not of how spans are cut."""
    block_size, length = 24, 24 * 9 + 7
    whole = fixed_case("float32", 16, block_size, [length], rounding=rounding)
    whole["spans"]["begin"] = 0
    implementation.fixed_quantize(**whole)
    cuts = [0, 96, 120, length]
    pieces = fixed_case("float32", 16, block_size, np.diff(cuts).tolist())
    pieces["rounding"], spans = rounding, pieces["spans"]
    spans["begin"], spans["parameter_id"] = cuts[:3], whole["spans"]["parameter_id"]
    source = whole["input"][3 : 3 + length]
    for span in spans:
        at, begin = span["offset"], span["begin"]
        pieces["input"][at : at + span["length"]] = source[begin:][: span["length"]]
    implementation.block_exponents(**exponents_case(pieces))
    implementation.fixed_quantize(**pieces)
    joined = b"".join(
        pieces["payload"][s["body"] : s["body"] + 2 * s["length"]].tobytes()
        for s in spans
    )
    start = int(whole["spans"]["body"][0])
    assert joined == whole["payload"][start : start + 2 * length].tobytes()
