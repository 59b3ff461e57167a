"""What csrc/kernels/quantize.h promises, checked without the reference's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import DTYPES, decode, encode, quantize_body
from tests.tolerances import (
    SMALL_HALF_RELATIVE,
    assert_within,
    quantize_nearest,
    quantize_stochastic,
    stochastic_mean,
)

from commkern.reference.numerics import FORMATS
from commkern.spans import one_span

BLOCK = 32
WIDE = {"float32": "float32", "float64": "float64"}


class Coded:
    """A payload of one span, taken apart by naive loops over bits."""

    def __init__(self, payload: np.ndarray, count: int, bits: int, dtype: str) -> None:
        compute = FORMATS[dtype].compute
        blocks = -(-count // BLOCK)
        self.scales = payload[: blocks * compute.itemsize].view(compute)
        stream = payload[self.scales.nbytes :]
        self.codes = np.array([_code(stream, j, bits) for j in range(count)])
        self.tail = "".join(f"{byte:08b}"[::-1] for byte in stream)[count * bits :]
        self.values = self.codes * np.repeat(self.scales, BLOCK)[:count].astype(float)


def _code(stream: np.ndarray, index: int, bits: int) -> int:
    value = 0
    for bit in range(bits):
        position = index * bits + bit
        value |= (int(stream[position // 8]) >> position % 8 & 1) << bit
    return value - (1 << bits) if value >> (bits - 1) else value


def quantized(
    implementation: Any, data: np.ndarray, dtype: str, bits: int, **settings: Any
) -> np.ndarray:
    payload = np.zeros(quantize_body(bits, BLOCK, dtype)(data.size), np.uint8)
    implementation.quantize(
        spans=one_span(data.size, parameter_id=77),
        input=data,
        dtype=dtype,
        payload=payload,
        bits=bits,
        block_size=BLOCK,
        **settings,
    )
    return payload


def round_trip(
    implementation: Any, values: Any, dtype: str, bits: int = 8, **settings: Any
) -> np.ndarray:
    """decode(dequantize(quantize(values))) as fp64."""
    data = encode(np.asarray(values, dtype=np.float64), dtype)
    payload = quantized(implementation, data, dtype, bits, **settings)
    output = encode(np.full(data.size, 99.0), dtype)
    implementation.dequantize(
        spans=one_span(data.size),
        payload=payload,
        output=output,
        dtype=dtype,
        bits=bits,
        block_size=BLOCK,
    )
    return decode(output, dtype)


def gradients(count: int, magnitude: float = 1.0) -> np.ndarray:
    return np.random.default_rng(count).standard_normal(count) * magnitude


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_and_padding(implementation: Any, dtype: str, bits: int) -> None:
    """Scales first, then dense codes; the bits behind the last code are zero."""
    for count in (1, 31, 33, 95):
        data = encode(gradients(count), dtype)
        raw = quantized(implementation, data, dtype, bits)
        coded = Coded(raw, count, bits, dtype)
        x, largest = decode(data, dtype), 2 ** (bits - 1) - 1
        assert set(coded.tail) <= {"0"}
        assert np.abs(coded.codes).max() == largest
        for block, scale in enumerate(coded.scales):
            peak = np.abs(x[block * BLOCK :][:BLOCK]).max()
            assert scale == coded.scales.dtype.type(peak) / largest
        half = quantize_nearest(
            np.repeat(coded.scales, BLOCK)[:count], bits, _wide(dtype)
        )
        assert_within(coded.values, x, half.astype(float))


def _wide(dtype: str) -> str:
    return FORMATS[dtype].compute.name


@pytest.mark.parametrize("magnitude", [1e-44, 1e-41, 1e-38, 1e-20, 1.0, 1e30])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_error_is_bounded(
    implementation: Any, dtype: str, bits: int, magnitude: float
) -> None:
    data = encode(gradients(300, magnitude), dtype)
    x = decode(data, dtype)
    for rounding, bound in (
        ("nearest", quantize_nearest),
        ("stochastic", quantize_stochastic),
    ):
        raw = quantized(implementation, data, dtype, bits, rounding=rounding)
        coded = Coded(raw, data.size, bits, dtype)
        scales = np.repeat(coded.scales, BLOCK)[: data.size].astype(float)
        assert_within(coded.values, x, bound(scales, bits, dtype), rounding)


@pytest.mark.parametrize("bits", [4, 8])
def test_nearest_breaks_ties_to_even(implementation: Any, bits: int) -> None:
    largest = 2 ** (bits - 1) - 1
    values = np.array([largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.0, -largest])
    data = values.astype(np.float32)
    raw = quantized(implementation, data, "float32", bits)
    coded = Coded(raw, data.size, bits, "float32")
    assert coded.scales.tolist() == [1.0]
    assert coded.codes.tolist() == [largest, 0, 2, 2, 0, -2, -2, 3, -largest]


def test_stochastic_rounding_takes_the_documented_bytes(implementation: Any) -> None:
    """Codes from a scalar Philox, byte by byte; block 3 of a parameter, 24 a block."""
    block_size, count, seed, step, stream, name = 24, 40, 2**40 + 5, 9, 65537, 1234
    values = np.linspace(-126.9, 126.9, count).astype(np.float32)
    values[[0, 24]] = 127.0  # scales of exactly 1
    payload = np.zeros(8 + count, np.uint8)
    implementation.quantize(
        spans=one_span(count, begin=3 * block_size, parameter_id=name),
        input=values,
        dtype="float32",
        payload=payload,
        block_size=block_size,
        rounding="stochastic",
        seed=seed,
        step=step,
        stream=stream,
    )
    expected = []
    for j, value in enumerate(values.tolist()):
        draw = (3 + j // block_size) * 2 + j % block_size // 16
        words = scalar_philox((draw, name, step, stream), seed)
        byte = words[j % block_size % 16 // 4] >> 8 * (j % block_size % 4) & 0xFF
        u = np.float32((byte + 0.5) / 256)
        expected.append(min(127, int(np.floor(np.float32(value) + u))))
    assert payload[8:].view(np.int8).tolist() == expected


def scalar_philox(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    """Philox-4x32-10 as its paper writes it, on Python integers."""
    c, k, mask = list(counter), [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c[0], 1 << 32)
        hi1, lo1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased(implementation: Any, bits: int) -> None:
    """Over 64 steps and 64 equal blocks of one parameter."""
    block = gradients(BLOCK).astype(np.float32)
    data, total = np.tile(block, 64), np.zeros(BLOCK)
    for step in range(64):
        raw = quantized(
            implementation, data, "float32", bits, rounding="stochastic", step=step
        )
        scales, codes = raw[:256].view(np.float32), raw[256:]
        if bits == 4:
            codes = np.stack([codes << 4, codes], axis=1).reshape(-1)
        signed = codes.view(np.int8).astype(int) >> (8 - bits)
        total += (signed * float(scales[0])).reshape(64, BLOCK).sum(axis=0)
    tolerance = stochastic_mean(float(scales[0]), 64 * 64)
    assert_within(total / 64**2, block, tolerance, "mean")


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", 1), ("seed", 1 << 32), ("step", 1), ("stream", 1), ("stream", 1 << 24)],
)
def test_every_counter_word_changes_the_noise(
    implementation: Any, field: str, value: int
) -> None:
    data = gradients(256).astype(np.float32)
    settings = {"rounding": "stochastic", "seed": 0, "step": 0, "stream": 0}
    first = quantized(implementation, data, "float32", 8, **settings)
    again = quantized(implementation, data, "float32", 8, **settings)
    other = quantized(implementation, data, "float32", 8, **(settings | {field: value}))
    assert (first == again).all()
    changed = (first[32:] != other[32:]).mean()
    assert changed > 0.2  # a third of independent draws differ on average


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
class TestSpecialBlocks:
    def test_zeros(
        self, implementation: Any, dtype: str, bits: int, rounding: str
    ) -> None:
        for zero in (0.0, -0.0):
            values = [zero] * (BLOCK + 3)
            result = round_trip(implementation, values, dtype, bits, rounding=rounding)
            assert result.tobytes() == np.zeros(BLOCK + 3).tobytes()

    def test_one_value(
        self, implementation: Any, dtype: str, bits: int, rounding: str
    ) -> None:
        values = np.full(BLOCK, -7.0)
        result = round_trip(implementation, values, dtype, bits, rounding=rounding)
        assert result.tolist() == values.tolist()  # 7 / 7 and 7 / 127 * 127 are exact

    @pytest.mark.parametrize("value", [1e-45, 1e-42, 3e-41])
    def test_denormals(
        self, implementation: Any, dtype: str, bits: int, rounding: str, value: float
    ) -> None:
        values = decode(encode(np.full(BLOCK, value), dtype), dtype)
        values[::3] *= -1
        result = round_trip(implementation, values, dtype, bits, rounding=rounding)
        spacing = {"float64": 0.0, "float32": 2.0**-149}.get(dtype, 2.0**-133)
        largest = 2 ** (bits - 1) - 1
        tolerance = value * 1.01 / largest + largest * spacing / 2 + spacing
        assert_within(result, values, tolerance)

    def test_largest(
        self, implementation: Any, dtype: str, bits: int, rounding: str
    ) -> None:
        tops = {"float64": np.finfo(float).max, "float16": 65504.0}
        top = tops.get(dtype, 3.4028234663852886e38)
        top = 3.3895313892515355e38 if dtype == "bfloat16" else top
        values = np.array([top, -top, top / 2, 0.0] * 8)
        result = round_trip(implementation, values, dtype, bits, rounding=rounding)
        assert np.isfinite(result).all()
        step = top / (2 ** (bits - 1) - 1)
        assert_within(result, values, step * 1.01 + top * 2**-7)
        assert_within(result[:2], values[:2], top * 2**-8)

    @pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
    def test_nonfinite_spoils_its_block_only(
        self, implementation: Any, dtype: str, bits: int, rounding: str, special: float
    ) -> None:
        clean = gradients(3 * BLOCK + 5)
        before = round_trip(implementation, clean, dtype, bits, rounding=rounding)
        for place in (BLOCK, BLOCK + 11, 2 * BLOCK - 1):
            values = clean.copy()
            values[place] = special
            after = round_trip(implementation, values, dtype, bits, rounding=rounding)
            assert np.isnan(after[BLOCK : 2 * BLOCK]).all()
            others = np.r_[0:BLOCK, 2 * BLOCK : values.size]
            assert after[others].tobytes() == before[others].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_scale_is_canonical(implementation: Any, dtype: str) -> None:
    values = np.zeros(BLOCK)
    values[5] = -np.inf
    raw = quantized(implementation, encode(values, dtype), dtype, 8)
    wide = FORMATS[dtype].compute
    expected = 0x7FF8000000000000 if wide.itemsize == 8 else 0x7FC00000
    assert raw[: wide.itemsize].view(f"<u{wide.itemsize}").tolist() == [expected]
    assert not raw[wide.itemsize :].any()


def test_small_half_values_survive(implementation: Any) -> None:
    random = np.random.default_rng(1)
    values = random.uniform(0.5e-6, 1e-6, 256) * random.choice([-1, 1], 256)
    values = decode(encode(values, "float16"), "float16")
    result = round_trip(implementation, values, "float16")
    assert_within(result / values, 1.0, SMALL_HALF_RELATIVE, "relative")


def test_mixed_magnitudes(implementation: Any) -> None:
    values = np.array([1e-6, 1.0])
    for dtype in DTYPES:
        result = round_trip(implementation, values, dtype)
        assert_within(result, values, [1 / 254, 2.0**-8], dtype)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_the_error(
    implementation: Any, dtype: str, rounding: str, in_place: bool
) -> None:
    """residual = a - dequantize(quantize(a)) in bits; a spoilt block keeps its own."""
    data = encode(gradients(100), dtype)
    data[70] = encode(np.array([np.inf]), dtype)[0]
    old = (gradients(101)[:100] * 1e-3).astype(np.float32)
    new = old.copy() if in_place else np.full(100, 5.0, np.float32)
    versions = (new, new) if in_place else (old.copy(), new)
    settings: dict[str, Any] = {"rounding": rounding, "step": 3}
    raw = quantized(implementation, data, dtype, 8, residual=versions, **settings)
    wide = FORMATS[dtype].compute
    sent = np.zeros(100, wide)
    implementation.dequantize(
        spans=one_span(100), payload=raw, output=sent, dtype=wide.name, block_size=BLOCK
    )
    with np.errstate(invalid="ignore"):
        a = decode(data, dtype).astype(wide) + old.astype(wide)
        error = (a - sent).astype(np.float32)
    spoilt = np.zeros(100, bool)
    spoilt[64:96] = True
    expected = np.where(spoilt, old, error)
    assert new.tobytes() == expected.tobytes()
    if not in_place:
        assert versions[0].tobytes() == old.tobytes()


def test_errors_of_fp64_that_no_fp32_holds_leave_the_residual(
    implementation: Any,
) -> None:
    """Above 1e38 the error of a block can exceed fp32: it is dropped, never Inf."""
    values = np.array([1e60, 3e59] + [1e-3] * 14)
    payload = np.zeros(8 + 16, np.uint8)
    before = np.full(16, 0.5, np.float32)
    after = np.zeros(16, np.float32)
    implementation.quantize(
        spans=one_span(16),
        input=values,
        dtype="float64",
        payload=payload,
        residual=(before, after),
        block_size=16,
    )
    assert after[1] == np.float32(0.5)
    assert np.isfinite(after).all()
