"""What csrc/core/format.h promises of every format, without its arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.kernels.harness import format_body

from commkern.formats import CODES, ROUNDINGS, Format
from commkern.spans import one_span

DTYPES = (np.float32, np.float64)
NAN_BYTES = {
    "float16": "007e",
    "bfloat16": "c07f",
    "e8m0": "ff",
    "ocp": "ff",
    "e4m3": "7f",
}


def every_format() -> Iterator[tuple[Format, str]]:
    """All codes, scales, statistics and roundings that go together."""
    for name, code in CODES.items():
        for bits in sorted({*code.bits}):
            for scales in code.scales:
                for statistic in code.statistics:
                    fmt = Format(name, bits, 32, scales, statistic, 0.5)
                    yield from ((fmt, r) for r in ROUNDINGS if is_valid(fmt, r))


def is_valid(fmt: Format, rounding: str) -> bool:
    try:
        fmt.check(rounding)
    except ValueError:
        return False
    return True


FORMATS = list(every_format())
IDS = [f"{f.code}-{f.bits}-{f.scales}-{f.statistic}-{r}" for f, r in FORMATS]
formats = pytest.mark.parametrize(("fmt", "rounding"), FORMATS, ids=IDS)


class Coded:
    """The body of one span, taken apart, and what it decodes to."""

    def __init__(
        self, implementation: Any, values: np.ndarray, fmt: Format, rounding: str
    ) -> None:
        name, spans = values.dtype.name, one_span(values.size, parameter_id=5)
        call = {"spans": spans, "dtype": name} | fmt.fields()
        self.body = np.zeros(format_body(fmt, name)(values.size), np.uint8)
        implementation.quantize(
            **call, input=values, payload=self.body, rounding=rounding
        )
        self.values, flag = np.full_like(values, 99), np.zeros(1, np.uint8)
        implementation.dequantize(
            **call, payload=self.body, output=self.values, nonfinite=flag
        )
        self.nonfinite = bool(flag[0])
        sizes = fmt.head_nbytes(name), fmt.scales_nbytes(values.size, name)
        sizes = (*sizes, fmt.offsets_nbytes(values.size, name))
        head, scales, offsets = np.cumsum(sizes)
        self.head = self.body[:head]
        self.scales = self.head if fmt.scales == "span" else self.body[head:scales]
        self.offsets, self.codes = self.body[scales:offsets], self.body[offsets:]


def normal(count: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).standard_normal(count).astype(dtype)


@formats
def test_zeros(implementation: Any, fmt: Format, rounding: str) -> None:
    for zero, dtype in itertools.product((0.0, -0.0), DTYPES):
        coded = Coded(implementation, np.full(71, zero, dtype), fmt, rounding)
        assert coded.values.tobytes() == bytes(coded.values.nbytes)
        one = np.ones(1, dtype).tobytes() if fmt.scales == "float16" else b""
        assert coded.body.tobytes() == one + bytes(coded.body.size - len(one))
        assert not coded.nonfinite


@formats
def test_the_largest_numbers_stay_finite(
    implementation: Any, fmt: Format, rounding: str
) -> None:
    """Blocks of one sign, of both, and of both and in between."""
    pattern = np.concatenate([np.ones(32), np.resize([1, -1], 32), normal(32, float)])
    pattern = pattern.clip(-1, 1)
    for dtype, factor in itertools.product(DTYPES, (1, 1 - 2.0**-11, 0.97, 0.6, 0.27)):
        values = (pattern * (float(np.finfo(dtype).max) * factor)).astype(dtype)
        for data in (values, -values):
            coded = Coded(implementation, data, fmt, rounding)
            assert np.isfinite(coded.values).all(), factor
            assert not coded.nonfinite


@formats
def test_nonfinite_blocks(implementation: Any, fmt: Format, rounding: str) -> None:
    for dtype, special in itertools.product(DTYPES, (np.nan, np.inf, -np.inf)):
        check_nonfinite_block(implementation, fmt, rounding, dtype, special)


def check_nonfinite_block(
    implementation: Any, fmt: Format, rounding: str, dtype: Any, special: float
) -> None:
    values = normal(96, dtype) / 64
    values[40] = special
    values[41] = 1.0
    coded = Coded(implementation, values, fmt, rounding)
    spoilt = np.zeros(96, bool)
    spoilt[32:64] = True
    canonical = np.array([np.nan], dtype).tobytes()
    if fmt.scales == "span":
        assert coded.head.tobytes() == canonical
        assert not coded.offsets.any()
        assert not coded.codes.any()
        spoilt[:] = True
    else:
        nan = bytes.fromhex(NAN_BYTES.get(fmt.scales, "")) or canonical
        width = len(nan)
        assert coded.scales[width : 2 * width].tobytes() == nan
        assert not coded.offsets[width : 2 * width].any()
        codes = fmt.codes_nbytes(32)
        assert not coded.codes[codes : 2 * codes].any()
    assert np.isnan(coded.values[spoilt]).all()
    assert np.isfinite(coded.values[~spoilt]).all()
    assert coded.nonfinite
    if fmt.scales != "span":  # the others are coded as beside a block of zeros
        values[32:64] = 0
        clean = Coded(implementation, values, fmt, rounding)
        np.testing.assert_array_equal(coded.values[~spoilt], clean.values[~spoilt])


@formats
def test_a_span_of_no_elements(implementation: Any, fmt: Format, rounding: str) -> None:
    assert fmt.body_nbytes(0, "float32") == 0
    coded = Coded(implementation, np.zeros(0, np.float32), fmt, rounding)
    assert coded.body.size == 0
    assert not coded.nonfinite


# --- offsets --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", CODES["asymmetric"].scales)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_equal_values_are_offsets(
    implementation: Any, rounding: str, scales: str, dtype: Any
) -> None:
    fmt = Format("asymmetric", 4, 16, scales, "range")
    for value in (1.0, -1.5, 1.75 * 2.0**100, -(2.0**-100)):
        data = np.full(40, value, dtype)
        coded = Coded(implementation, data, fmt, rounding)
        assert coded.values.tolist() == data.tolist()
        assert not coded.codes.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", CODES["asymmetric"].scales)
def test_offsets_reach_the_minimum(
    implementation: Any, scales: str, dtype: Any
) -> None:
    """Full-width ones are it; short ones the next number of their type below."""
    fmt = Format("asymmetric", 5, 16, scales, "range")
    values = normal(16 * 50, dtype) + dtype(0.5)
    coded = Coded(implementation, values, fmt, "nearest")
    least = values.reshape(50, 16).min(axis=1)
    if scales in ("compute", "span"):
        expected = least if scales == "compute" else least.min(keepdims=True)
        assert coded.offsets.view(dtype).tolist() == expected.tolist()
        return
    kind = np.float16 if scales == "float16" else ml_dtypes.bfloat16
    head = float(coded.head.view(dtype)[0]) if scales == "float16" else 1.0
    offsets = coded.offsets.view(kind).astype(np.float64) * head
    above = np.nextafter(coded.offsets.view(kind), kind(np.inf)).astype(np.float64)
    assert (offsets <= least).all()
    assert (above * head > least).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", CODES["asymmetric"].scales)
def test_a_range_that_overflows_is_halved(
    implementation: Any, scales: str, dtype: Any
) -> None:
    top = float(np.finfo(dtype).max)
    values = (np.linspace(-1, 1, 33) * top).astype(dtype)
    fmt = Format("asymmetric", 8, 64, scales, "range")
    coded = Coded(implementation, values, fmt, "nearest")
    if scales in ("compute", "span"):
        assert coded.scales.view(dtype)[0] < 0
    limit = 2 / 255 if scales in ("compute", "span") else 2.0**-6
    if scales != "bfloat16" or dtype == np.float32:  # fp64 saturates at bf16's largest
        assert (np.abs(coded.values / 2 - values / 2) <= limit * top).all()
    assert np.isfinite(coded.values).all()
