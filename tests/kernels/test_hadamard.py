"""The randomised Hadamard transform: bits, and what makes it a rotation."""

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
)
from tests.tolerances import assert_within, hadamard

from commkern.reference.hadamard import ROTATIONS, STREAM
from commkern.reference.numerics import FORMATS
from commkern.reference.philox import key_of, philox4x32
from commkern.spans import one_span

SEED = 0xFEDCBA9876543210
PARAMETER_ID = 0x9E3779B1
LENGTHS = [*range(130), 255, 256, 257, 511, 1031, 4095]
COMPUTE = ("float32", "float64")


def case_of(
    dtype: str,
    lengths: list[int],
    rotation: int,
    inverse: int = 0,
    begins: list[int] | None = None,
) -> dict[str, Any]:
    spans, elements, _, _ = make_spans(lengths, lambda length: 0, begins=begins)
    return {
        "spans": spans,
        "input": numbers(rotation, elements, dtype),
        "output": filler(elements, FORMATS[dtype].storage),
        "dtype": dtype,
        "rotation": rotation,
        "inverse": inverse,
        "seed": SEED,
    }


def turned(
    implementation: Any,
    values: np.ndarray,
    rotation: int,
    *,
    inverse: int = 0,
    begin: int = 0,
) -> np.ndarray:
    """One span of fp32 or fp64 ``values``."""
    output = np.full_like(values, np.nan)
    implementation.hadamard(
        spans=one_span(values.size, begin=begin, parameter_id=PARAMETER_ID),
        input=values,
        output=output,
        dtype=values.dtype.name,
        rotation=rotation,
        inverse=inverse,
        seed=SEED,
    )
    return output


def signs(begin: int, count: int) -> np.ndarray:
    """The contract, element by element."""
    found = []
    for index in range(begin, begin + count):
        draw, bit = divmod(index, 128)
        words = philox4x32((draw, PARAMETER_ID, 0, STREAM), key_of(SEED))
        found.append(-1 if int(words[bit // 32]) >> bit % 32 & 1 else 1)
    return np.array(found)


def matrix(size: int) -> np.ndarray:
    """Sylvester's: -1 where the indices have an odd number of bits in common."""
    result = np.ones((1, 1), np.int64)
    while len(result) < size:
        result = np.block([[result, result], [result, -result]])
    return result


def factor(size: int, dtype: Any) -> Any:
    """2^(-k/2), rounded once: fp32 from fp64 that is correct to its last bit."""
    return np.dtype(dtype).type(1 / np.sqrt(np.longdouble(size)))


# --- bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("rotation", [32, 128, 512, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(
    compiled: Any, dtype: str, rotation: int, inverse: int
) -> None:
    case = case_of(dtype, LENGTHS, rotation, inverse)
    for shift in MISALIGNMENTS:
        compare(compiled, "hadamard", shift=shift, **case)


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", COMPUTE)
def test_every_rotation(compiled: Any, dtype: str, rotation: int, inverse: int) -> None:
    """Signs that begin anywhere in a draw, also past 2^32 draws."""
    lengths = [rotation, 3 * rotation + 77, 9001, 2 * rotation - 1]
    begins = [3 * rotation, 0, rotation << 30, 127 * rotation]
    compare(compiled, "hadamard", **case_of(dtype, lengths, rotation, inverse, begins))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(compiled: Any, dtype: str) -> None:
    for inverse in (0, 1):
        case = case_of(dtype, [0, 5, 700, 4096 + 33], 64, inverse)
        compare(compiled, "hadamard", **case | {"output": case["input"]})


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_piece(
    compiled: Any, dtype: str, special: float
) -> None:
    case = case_of(dtype, [4 * 64 + 38], 64)
    first = int(case["spans"][0]["offset"])
    for place in (64, 100, 4 * 64 + 33):
        changed = case["input"].copy()
        changed[first + place] = encode(np.array([special]), dtype)[0]
        view = {"output": dtype}
        result = compare(
            compiled, "hadamard", nan_view=view, **case | {"input": changed}
        )
        finite = np.isfinite(decode(result["output"][first:], dtype))[: 4 * 64 + 38]
        begin, end = (64, 128) if place < 256 else (256 + 32, 256 + 36)
        assert not finite[begin:end].any()
        assert finite[:begin].all()
        assert finite[end:].all()


@pytest.mark.parametrize("dtype", COMPUTE)
def test_denormals_and_overflow(compiled: Any, dtype: str) -> None:
    for magnitude in (np.finfo(dtype).smallest_subnormal * 9, np.finfo(dtype).max / 4):
        case = case_of(dtype, [357], 128)
        values = np.random.default_rng(6).choice([-1, 0, 1], len(case["input"]))
        case["input"] = (values * magnitude).astype(dtype)
        view = {"output": dtype}
        for inverse in (0, 1):
            compare(compiled, "hadamard", nan_view=view, **case | {"inverse": inverse})


# --- the transform --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << k for k in range(13)])
@pytest.mark.parametrize("dtype", COMPUTE)
def test_integers_against_the_matrix(
    implementation: Any, dtype: str, size: int
) -> None:
    """Sums of integers are exact, and so one rounding is all there is."""
    begin, count = 4096 * 3, min(size, 700)
    values = np.random.default_rng(size).integers(-500, 501, size)
    sign, dense = signs(begin, size), matrix(size)[:count]
    got = turned(implementation, values.astype(dtype), 4096, begin=begin)
    expected = (dense @ (sign * values)).astype(dtype) * factor(size, dtype)
    np.testing.assert_array_equal(got[:count], expected)
    got = turned(implementation, values.astype(dtype), 4096, begin=begin, inverse=1)
    expected = (dense @ values).astype(dtype) * factor(size, dtype) * sign[:count]
    np.testing.assert_array_equal(got[:count], expected)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("dtype", COMPUTE)
def test_images_of_the_axes_are_orthonormal(
    implementation: Any, dtype: str, size: int
) -> None:
    """One element of 1 becomes n of +-1 / sqrt(n), orthogonal to all others."""
    axes = np.eye(size, dtype=dtype)
    images = np.array([turned(implementation, axis, size) for axis in axes])
    units = images / factor(size, dtype)
    np.testing.assert_array_equal(np.abs(units), 1)
    np.testing.assert_array_equal(units @ units.T, size * np.eye(size))
    np.testing.assert_array_equal(units, signs(0, size)[:, None] * matrix(size))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", COMPUTE)
def test_inverse_within_its_bound(
    implementation: Any, dtype: str, rotation: int
) -> None:
    """And the norm is kept, of whole pieces and of the tail's."""
    for size in (rotation, rotation // 2, 8, 1):
        values = np.random.default_rng(size).standard_normal(size).astype(dtype)
        norm = np.linalg.norm(values.astype(np.longdouble))
        image = turned(implementation, values, rotation)
        length = np.linalg.norm(image.astype(np.longdouble))
        assert_within(length, norm, float(hadamard(norm, size, 1, dtype)))
        for back in (
            turned(implementation, image, rotation, inverse=1),
            turned(
                implementation,
                turned(implementation, values, rotation, inverse=1),
                rotation,
            ),
        ):
            assert_within(back, values, float(hadamard(norm, size, 2, dtype)))


def test_a_span_may_be_cut_between_pieces(implementation: Any) -> None:
    values = np.random.default_rng(3).standard_normal(5 * 96 + 32 + 9).astype("f4")
    whole = turned(implementation, values, 32, begin=64)
    for cut in range(0, 512, 32):
        parts = [
            turned(implementation, values[:cut], 32, begin=64),
            turned(implementation, values[cut:], 32, begin=64 + cut),
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_spread_of_one_large_value(implementation: Any) -> None:
    """What it is for: the largest magnitude falls by sqrt(n)."""
    values = np.zeros(1024, np.float32)
    values[77] = 96.0
    assert np.abs(turned(implementation, values, 1024)).max() == 3.0


# --- arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", [-32, 0, 1, 16, 48, 100, 8192, 1 << 20])
def test_rotation_is_checked(implementation: Any, rotation: int) -> None:
    case = case_of("float32", [40], 32) | {"rotation": rotation}
    with pytest.raises(ValueError, match=rf"power of two.*32.*4096, got {rotation}$"):
        implementation.hadamard(**case)


@pytest.mark.parametrize("inverse", [-1, 2])
def test_inverse_is_checked(implementation: Any, inverse: int) -> None:
    case = case_of("float32", [40], 32, inverse)
    with pytest.raises(ValueError, match=rf"inverse.*0 or 1, got {inverse}$"):
        implementation.hadamard(**case)


def test_begin_within_a_piece(implementation: Any) -> None:
    case = case_of("float32", [40, 7], 64, begins=[64, 96])
    with pytest.raises(ValueError, match=r"1.*begin.*rotation 64, got 96$"):
        implementation.hadamard(**case)


def test_seed_is_checked(implementation: Any) -> None:
    for seed in (-1, 1 << 64):
        case = case_of("float32", [40], 32) | {"seed": seed}
        with pytest.raises(ValueError, match=rf"seed.*{seed}"):
            implementation.hadamard(**case)
