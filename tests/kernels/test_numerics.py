"""Conversions between formats against torch, ml_dtypes and exact rationals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from commkern.formats import Format
from commkern.reference.numerics import (
    FORMATS,
    exact_arithmetic,
    from_compute,
    largest_magnitude,
    to_compute,
)
from commkern.reference.scales import scales_of

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ALL = np.arange(65536, dtype=np.uint16)


def edge_floats() -> np.ndarray:
    """fp32 numbers at, and one step beside, every 16-bit number and every midpoint."""
    found = []
    for dtype in TORCH:
        with np.errstate(all="ignore"):
            exact = to_compute(ALL, FORMATS[dtype], np.dtype(np.float64))
        finite = np.unique(exact[np.isfinite(exact)])
        found += [finite, (finite[1:] + finite[:-1]) / 2, finite[[0, -1]] * 1.001]
    with np.errstate(all="ignore"):
        middle = np.concatenate(found).astype(np.float32)
        sides = [np.nextafter(middle, np.float32(to)) for to in (-np.inf, np.inf)]
    specials = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e-45, -0.0], np.float32)
    return np.concatenate([middle, *sides, specials])


@pytest.mark.parametrize("dtype", TORCH)
def test_every_pattern_widens_as_torch_does(dtype: str) -> None:
    with exact_arithmetic():
        wide = to_compute(ALL, FORMATS[dtype], np.dtype(np.float32))
    expected = torch.from_numpy(ALL.view(np.int16)).view(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(wide, expected)
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(expected))


@pytest.mark.parametrize("dtype", TORCH)
def test_edges_narrow_as_torch_does(dtype: str) -> None:
    values = edge_floats()
    with exact_arithmetic():
        narrow = from_compute(values, FORMATS[dtype])
    converted = torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy()
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(narrow[numbers], converted.view(np.uint16)[numbers])


def test_edges_narrow_as_ml_dtypes_does() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = edge_floats()
    with exact_arithmetic():
        narrow = from_compute(values, FORMATS["bfloat16"])
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(narrow[numbers], expected[numbers])


@pytest.mark.parametrize(("dtype", "nan"), [("float16", 0x7E00), ("bfloat16", 0x7FC0)])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_nan_is_canonical(dtype: str, nan: int, wide: type) -> None:
    unsigned, quiet = {
        np.float32: (np.uint32, [0x7FC00000, 0xFFC12345, 0x7F800001, 0xFFFFFFFF]),
        np.float64: (np.uint64, [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1]),
    }[wide]
    bits = np.array(quiet, dtype=unsigned)
    with exact_arithmetic():
        narrow = from_compute(bits.view(wide), FORMATS[dtype])
    sign = (bits >> unsigned(8 * bits.itemsize - 1)).astype(int) << 15
    assert narrow.tolist() == (sign | nan).tolist()


@pytest.mark.parametrize("dtype", TORCH)
def test_fp64_narrows_in_one_rounding(dtype: str) -> None:
    """Just above a midpoint in fp64, exactly on it in fp32: two roundings would err."""
    with exact_arithmetic():
        exact = to_compute(ALL, FORMATS[dtype], np.dtype(np.float64))
        finite = np.unique(np.abs(exact[np.isfinite(exact)]))
        middle = (finite[1:] + finite[:-1]) / 2
        for side, chosen in ((np.inf, finite[1:]), (-np.inf, finite[:-1])):
            values = np.nextafter(middle, side)
            for sign in (1, -1):
                narrow = from_compute(sign * values, FORMATS[dtype])
                back = to_compute(narrow, FORMATS[dtype], np.dtype(np.float64))
                np.testing.assert_array_equal(back, sign * chosen)


@pytest.mark.parametrize("bits", [3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_block_scale_rule(dtype: type, bits: int) -> None:
    """The nearest quotient, or one less where L * scale would overflow."""
    top = np.finfo(dtype).max
    largest = 2 ** (bits - 1) - 1
    absmax = top * (1 - np.arange(64, dtype=dtype) * np.finfo(dtype).epsneg)
    with exact_arithmetic():
        fmt = Format(bits=bits, block_size=16)
        scale = scales_of(np.repeat(absmax.astype(dtype), 16), fmt).scale
        product, above = scale * dtype(largest), np.nextafter(scale, dtype(np.inf))
        above_product = above * dtype(largest)
    assert np.isfinite(product).all()
    for a, s, up, up_product in zip(absmax, scale, above, above_product, strict=True):
        ratio, below = Fraction(float(a)) / largest, np.nextafter(s, dtype(0))
        misses = [abs(Fraction(float(v)) - ratio) for v in (below, s, up)]
        assert misses[1] == min(misses) or np.isinf(up_product)


def test_largest_magnitude() -> None:
    values = np.array([[1.0, -3.0], [np.nan, np.inf], [-0.0, 0.0]], np.float32)
    largest = largest_magnitude(values, axis=1)
    assert largest[0] == 3
    assert np.isnan(largest[1])
    assert largest[2].tobytes() == np.float32(0).tobytes()
    assert largest_magnitude(np.empty(0, np.float64)) == 0
