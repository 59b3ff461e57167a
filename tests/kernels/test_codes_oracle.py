"""Codes and scales of the formats against other people's definitions of them."""

from __future__ import annotations

import bisect
import math
import statistics
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.kernels.harness import format_body
from tests.kernels.test_quantize_contract import scalar_philox

from commkern.formats import Format
from commkern.reference.code_books import NF4, dynamic_map
from commkern.reference.codes import encode_minifloat, minifloat_values
from commkern.reference.numerics import round_to_odd
from commkern.reference.scales import ordered_sum
from commkern.spans import one_span

MINIFLOATS = {
    "float8_e4m3": (ml_dtypes.float8_e4m3fn, 8),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 8),
    "float6_e3m2": (ml_dtypes.float6_e3m2fn, 6),
    "float6_e2m3": (ml_dtypes.float6_e2m3fn, 6),
    "float4_e2m1": (ml_dtypes.float4_e2m1fn, 4),
}
LARGEST_EXPONENT = {
    "float8_e4m3": 8,
    "float8_e5m2": 15,
    "float6_e3m2": 4,
    "float6_e2m3": 2,
    "float4_e2m1": 2,
}


def coded(implementation: Any, values: np.ndarray, fmt: Format, **settings: Any) -> Any:
    """The body of one span."""
    payload = np.zeros(format_body(fmt, values.dtype.name)(values.size), np.uint8)
    implementation.quantize(
        spans=one_span(values.size, parameter_id=77),
        input=values,
        dtype=values.dtype.name,
        payload=payload,
        **fmt.fields(),
        **settings,
    )
    return payload


def decoded(implementation: Any, body: np.ndarray, fmt: Format, like: Any) -> Any:
    output = np.zeros_like(like)
    implementation.dequantize(
        spans=one_span(like.size),
        payload=body,
        output=output,
        dtype=like.dtype.name,
        **fmt.fields(),
    )
    return output


def oracle_bits(values: np.ndarray, name: str) -> np.ndarray:
    """ml_dtypes' own rounding of values in range, the sign of zero dropped.

    It takes fp64 through fp32; rounded to odd there, that is one rounding.
    """
    kind, bits = MINIFLOATS[name]
    limit = float(ml_dtypes.finfo(kind).max)
    narrow = round_to_odd(np.clip(values, -limit, limit))
    stored = narrow.astype(kind).view(np.uint8)
    zero = stored & ((1 << (bits - 1)) - 1) == 0
    return np.where(zero, 0, stored)


def awkward_values(name: str, dtype: Any) -> np.ndarray:
    """Every value, every midpoint, and the numbers right beside them; and others."""
    exact = np.unique(minifloat_values(name, np.dtype(np.float64)))
    exact = exact[np.isfinite(exact)]
    points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.5])
    points = points.astype(dtype)
    random = np.random.default_rng(3).standard_normal(4000).astype(dtype)
    beside = [np.nextafter(points, dtype(side * np.inf)) for side in (-1, 1)]
    tiny = np.array([1e-30, -1e-40, 0.0, -0.0], dtype)
    return np.concatenate([points, *beside, random, random * dtype(30), tiny])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloats_round_as_ml_dtypes_does(name: str, dtype: Any) -> None:
    values = awkward_values(name, dtype)
    found = encode_minifloat(values, name)
    np.testing.assert_array_equal(found, oracle_bits(values, name))


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloats_decode_as_ml_dtypes_does(name: str) -> None:
    kind, bits = MINIFLOATS[name]
    patterns = np.arange(1 << bits).astype(np.uint8)
    expected = patterns.view(kind).astype(np.float64)
    found = minifloat_values(name, np.dtype(np.float64))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", MINIFLOATS)
def test_ocp_scales_and_codes(implementation: Any, name: str, dtype: Any) -> None:
    """The conversion of the specification, 6.3, block by block in plain Python."""
    fmt = Format(name, MINIFLOATS[name][1], 32, "ocp")
    random = np.random.default_rng(5)
    values = (
        random.standard_normal(32 * 9 + 5)
        * np.repeat(10.0 ** np.array([-42, -30, -8, -3, 0, 3, 8, 30, 37, 0]), 32)[
            : 32 * 9 + 5
        ]
    )
    values = values.astype(dtype)
    body = coded(implementation, values, fmt)
    codes = unpacked(body[10:], values.size, fmt.bits)
    for block in range(10):
        piece = values[32 * block :][:32].astype(np.float64)
        peak = np.abs(piece).max()
        exponent = math.frexp(peak)[1] - 1 - LARGEST_EXPONENT[name]
        exponent = min(max(exponent, -127), 127)
        assert body[block] == exponent + 127
        expected = oracle_bits(np.ldexp(piece, -exponent), name)
        assert codes[32 * block :][:32] == expected.tolist()
    scales = body[:10].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    kind, _ = MINIFLOATS[name]
    elements = np.array(codes, np.uint8).view(kind).astype(np.float64)
    expected = elements * np.repeat(scales, 32)[: values.size]
    np.testing.assert_array_equal(
        decoded(implementation, body, fmt, values), expected.astype(dtype)
    )


def unpacked(stream: np.ndarray, count: int, bits: int) -> list[int]:
    """Dense codes, by Python's big integers."""
    whole = int.from_bytes(stream.tobytes(), "little")
    return [whole >> (j * bits) & ((1 << bits) - 1) for j in range(count)]


def test_nvfp4(implementation: Any) -> None:
    fmt = Format("float4_e2m1", 4, 16, "e4m3")
    values = np.random.default_rng(7).standard_normal(16 * 40 + 3).astype(np.float32)
    values[:400] *= np.repeat(2.0 ** -np.arange(25), 16).astype(np.float32)
    body = coded(implementation, values, fmt)
    head = body[:4].view(np.float32)[0]
    peak = np.abs(values).max()
    assert head == peak / np.float32(448 * 6)
    blocks = -(-values.size // 16)
    scales = body[4 : 4 + blocks].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = unpacked(body[4 + blocks :], values.size, 4)
    for block, scale in enumerate(scales):
        piece = values[16 * block :][:16]
        wanted = np.abs(piece).max() / np.float32(6) / head
        assert scale == wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if scale == 0:
            assert not any(codes[16 * block :][:16])
            continue
        position = piece * (np.float32(1) / (scale * head))
        expected = oracle_bits(position, "float4_e2m1")
        assert codes[16 * block :][:16] == expected.tolist()


@pytest.mark.parametrize("code", ["symmetric", "ternary", "float8_e4m3", "nf4"])
def test_e8m0_scales_are_the_next_power_of_two(implementation: Any, code: str) -> None:
    bits = {"symmetric": 4, "ternary": 2, "nf4": 4}.get(code, 8)
    fmt = Format(code, bits, 16, "e8m0")
    rounding = "stochastic" if code == "ternary" else "nearest"
    peaks = [7.0, 6.9, 7.1, 1.0, 448.0, 449.0, 1e-38, 2.0**-149, 3e38, 0.0]
    values = np.repeat(np.array(peaks, np.float32), 16)
    body = coded(implementation, values, fmt, rounding=rounding)
    found = body[:10].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    for peak, scale in zip(values[::16], found, strict=True):
        wanted = float(peak / np.float32(fmt.largest))
        power = 2.0 ** (math.ceil(math.log2(wanted)) if wanted else -127)
        power = min(max(power, 2.0**-127), 2.0**127)
        if fmt.largest * power > float(np.finfo(np.float32).max):
            power /= 2
        assert scale == power


@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_16_bit_scales_are_rounded_up(
    implementation: Any, scales: str, dtype: Any
) -> None:
    """Against a search among all 16-bit numbers."""
    fmt = Format("symmetric", 4, 16, scales)
    random = np.random.default_rng(2)
    peaks = (10.0 ** random.uniform(-3, 3, 200)).astype(dtype)
    body = coded(implementation, np.repeat(peaks, 16), fmt)
    patterns = np.arange(0x7C00 if scales == "float16" else 0x7F80, dtype=np.uint16)
    stored = np.float16 if scales == "float16" else ml_dtypes.bfloat16
    numbers = patterns.view(stored).astype(np.float64)
    wanted = (peaks / dtype(7)).astype(np.float64)
    if scales == "float16":
        width = np.dtype(dtype).itemsize
        head = body[:width].view(dtype)[0]
        assert 2.0**14 <= wanted.max() / head < 2.0**15
        assert math.frexp(head)[0] == 0.5
        body, wanted = body[width:], wanted / float(head)
    found = body[:400].view(stored).astype(np.float64)
    np.testing.assert_array_equal(found, numbers[np.searchsorted(numbers, wanted)])


# --- code books -----------------------------------------------------------------------


def test_nf4_is_made_of_quantiles() -> None:
    """QLoRA's construction: of 1/2 ... 0.9677 in 8 and 9 steps, both sides, scaled."""
    quantile, offset = statistics.NormalDist().inv_cdf, 0.9677083
    up = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    down = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    values = np.sort(np.array([*up, 0.0, *down]))
    np.testing.assert_allclose(NF4, values / np.abs(values).max(), atol=2e-7)


def test_dynamic_map_is_that_of_bitsandbytes() -> None:
    """Its construction in torch, whose rounding of linspace is off by one ulp."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = (bounds[:-1] + bounds[1:]) / 2.0
        values += (10 ** (-6 + i) * means).tolist()
        values += (-(10 ** (-6 + i)) * means).tolist()
    expected = np.sort(np.array(values, np.float32))
    found = np.array(dynamic_map())
    assert found.tolist() == found.astype(np.float32).tolist()
    np.testing.assert_array_max_ulp(found.astype(np.float32), expected, maxulp=1)
    assert found.size == 256
    assert found[127] == 0


@pytest.mark.parametrize("book", ["nf4", "dynamic8"])
def test_book_codes_are_the_nearest(implementation: Any, book: str) -> None:
    bits, values = (4, NF4) if book == "nf4" else (8, dynamic_map())
    fmt = Format(book, bits, 64)
    table, zero = np.array(values), list(values).index(0.0)
    data = np.random.default_rng(1).uniform(-1, 1, 64 * 40).astype(np.float32)
    midpoints = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    data[1 : 1 + midpoints.size] = midpoints
    data[::64] = 1.0
    body = coded(implementation, data, fmt)
    codes = unpacked(body[4 * 40 :], data.size, bits)
    exact = [Fraction(entry) for entry in values]
    for value, code in zip(data.tolist(), codes, strict=True):
        first = max(bisect.bisect(values, value) - 2, 0)
        misses = [abs(Fraction(value) - entry) for entry in exact[first : first + 4]]
        assert code ^ zero == first + misses.index(min(misses))
    assert decoded(implementation, body, fmt, data).tolist() == [
        np.float32(table[code ^ zero]) for code in codes
    ]


# --- natural and ternary codes --------------------------------------------------------


def draw(index: int, parameter_id: int, block_size: int) -> int:
    """The random byte of an element, with seed, step and stream 0."""
    number = index // block_size * -(-block_size // 16) + index % block_size // 16
    words = scalar_philox((number, parameter_id, 0, 0), 0)
    place = index % block_size % 16
    return words[place // 4] >> 8 * (place % 4) & 0xFF


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_natural_codes(implementation: Any, bits: int, dtype: Any) -> None:
    """One of the powers of two around |x| / s: the upper one where the fraction and the
    draw, (byte + 0.5) / 256, make a whole; the fraction's bits past the eighth and a
    half count as they are."""
    fmt = Format("natural", bits, 16, "e8m0")
    random, top = np.random.default_rng(4), 2 ** (bits - 1) - 1
    values = random.standard_normal(160) * 2.0 ** random.integers(-9, 1, 160)
    values = np.clip(values, -1, 1).astype(dtype)
    values[::16] = 1.0
    body = coded(implementation, values, fmt, rounding="stochastic")
    assert (body[:10] == 127).all()
    codes = unpacked(body[10:], values.size, bits)
    for index, (value, code) in enumerate(zip(values.tolist(), codes, strict=True)):
        size, u = abs(value), (draw(index, 77, 16) + 0.5) / 256
        level = 0
        if size >= 2.0 ** (1 - top):
            exponent = math.frexp(size)[1] - 1
            fraction = size / 2.0**exponent - 1
            level = exponent + top + (fraction + u >= 1)
        elif size * 2.0 ** (top - 1) + u >= 1:
            level = 1
        sign = (value < 0) << (bits - 1) if level else 0
        assert code == level | sign
    levels = [code & top for code in codes]
    signs = [-1 if code >> (bits - 1) else 1 for code in codes]
    expected = [
        dtype(s * 2.0 ** (k - top) if k else 0.0)
        for s, k in zip(signs, levels, strict=True)
    ]
    assert decoded(implementation, body, fmt, values).tolist() == expected


def test_ternary_digits(implementation: Any) -> None:
    """Whole numbers of the scale are drawn as themselves: 21 of them, in 5 bytes."""
    fmt = Format("ternary", 2, 24)
    digits = [1, 0, -1, 1, 1, 0, 0, -1, 1, 0, -1, -1, 0, 1, 1, 0, 0, 0, -1, 1, -1]
    values = np.array(digits, np.float32) * 3
    body = coded(implementation, values, fmt, rounding="stochastic")
    assert body[:4].view(np.float32).tolist() == [3.0]
    code = [digit % 3 for digit in digits] + [0] * 4
    expected = [sum(code[j + 5 * t] * 3**t for t in range(5)) for j in range(5)]
    assert body[4:].tolist() == expected
    assert decoded(implementation, body, fmt, values).tolist() == values.tolist()


# --- sums -----------------------------------------------------------------------------


def naive_sum(values: np.ndarray) -> Any:
    """The documented order, in scalars."""
    number = values.dtype.type
    waiting: list[tuple[int, Any]] = []
    for start in range(0, values.size, 4096):
        lanes = [number(0)] * 16
        for index, value in enumerate(values[start : start + 4096]):
            lanes[index % 16] = lanes[index % 16] + value
        for half in (8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        size, total = 1, lanes[0]
        while waiting and waiting[-1][0] == size:
            size, total = 2 * size, waiting.pop()[1] + total
        waiting.append((size, total))
    while len(waiting) > 1:
        _, right = waiting.pop()
        size, left = waiting.pop()
        waiting.append((size, left + right))
    return waiting[0][1]


@pytest.mark.parametrize("size", [1, 15, 17, 128, 4096, 4097, 5 * 4096, 7 * 4096 + 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_have_the_documented_order(size: int, dtype: Any) -> None:
    values = np.random.default_rng(size).random((2, size)).astype(dtype)
    found = ordered_sum(values)
    for row in range(2):
        assert found[row] == naive_sum(values[row])


@pytest.mark.parametrize("scales", ["compute", "span"])
def test_norms_and_means(implementation: Any, scales: str) -> None:
    for size in (100, 5000, 9 * 4096 + 7):
        values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        block = values if scales == "span" else values[:128]
        q = np.float32(2.0 ** (1 - math.frexp(np.abs(block).max())[1]))
        norm = np.sqrt(naive_sum((block * q) ** 2)) / np.float32(7) / q
        body = coded(implementation, values, Format("symmetric", 4, 128, scales, "l2"))
        assert body[:4].view(np.float32)[0] == norm
        mean = naive_sum(np.abs(block) * q) / np.float32(block.size) / q
        body = coded(implementation, values, Format("sign", 1, 128, scales, "mean"))
        assert body[:4].view(np.float32)[0] == mean
