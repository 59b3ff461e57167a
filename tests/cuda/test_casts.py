"""The CUDA casts against the reference, in bits: the tests of the CPU's, run here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cuda.devices import Emulated
from tests.kernels.harness import DTYPES, compare, encode, numbers
from tests.kernels.test_cast import (
    cast_case,
    sum_case,
    test_all_16_bit_patterns,
    test_awkward_values,
    test_cast,
    test_every_short_length,
    test_misaligned_buffers,
    test_recast_sum,
    uncast_case,
)

__all__ = [
    "test_all_16_bit_patterns",
    "test_awkward_values",
    "test_cast",
    "test_every_short_length",
    "test_misaligned_buffers",
    "test_recast_sum",
]

LONG = [70_000, 1, 0, 1024, 3 * 1024 + 5]  # more tiles than blocks, whole tiles, less


def test_more_tiles_than_blocks(compiled: Any) -> None:
    case = cast_case("float32", "bfloat16", LONG, "committed")
    written = compare(compiled, "cast", **case)
    decoding = uncast_case(case, written["payload"])
    compare(compiled, "uncast", **decoding, scale=0.25)
    compare(compiled, "uncast_add", **decoding, scale=0.25)
    compare(compiled, "recast_sum", **sum_case(case, 3), wire_scale=0.5)


def test_the_identity_moves_bits(compiled: Any) -> None:
    """Without a change of format or a residual no NaN is touched."""
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        case = cast_case(dtype, dtype, [4099, 3])
        size = case["input"].dtype.itemsize
        nans = np.random.default_rng(8).bytes(len(case["input"]) * size)
        case["input"] = np.frombuffer(nans, np.uint8).view(case["input"].dtype)
        compare(compiled, "cast", **case)


@pytest.mark.parametrize("wire_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_between_spans_counts(
    compiled: Any, dtype: str, wire_dtype: str
) -> None:
    """NaNs behind a span, which one wide access would read along, raise no flag."""
    case = cast_case(dtype, wire_dtype, [5, 2, 1027])
    case["spans"]["offset"], case["spans"]["body"] = [0, 16, 32], [0, 128, 256]
    case["input"] = numbers(1, 1100, dtype)
    case["payload"] = np.full(256 + 1100 * 8, 0xFF, np.uint8)
    case["payload"] = compare(compiled, "cast", **case)["payload"]
    decoding = uncast_case(case, case["payload"])
    for kernel in ("uncast", "uncast_add"):
        written = compare(compiled, kernel, **decoding, scale=0.5)
        assert written["nonfinite"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_residual_stays_finite(compiled: Any, dtype: str) -> None:
    """An error that would take the residual out of range is dropped."""
    case = cast_case(dtype, "bfloat16", [256], "in place")
    for version in case["residual"]:
        version[:] = -np.finfo(np.float32).max  # the error below is negative, too
    parts = [np.zeros_like(case["payload"]) for _ in range(2)]
    start = int(case["spans"][0]["body"])
    for part, value in zip(parts, (3e38, 1e36), strict=True):
        body = encode(np.full(256, value), "bfloat16").view(np.uint8)
        part[start : start + body.size] = body
    summing = sum_case(case, 2) | {"parts": parts}
    written = compare(compiled, "recast_sum", **summing)
    assert np.isfinite(written["residual"][0]).all()


def test_denormals(compiled: Any) -> None:
    """No denormal is flushed, whichever format holds it."""
    for dtype in ("float32", "float64"):
        for wire_dtype in ("float32", "float64", "float16", "bfloat16"):
            case = cast_case(dtype, wire_dtype, [513], "two versions")
            tiny = {"float16": 1e-7, "float64": 1e-310}.get(wire_dtype, 1e-40)
            case["input"] = (numbers(4, len(case["input"]), "float64") * tiny).astype(
                case["input"].dtype
            )
            for version in case["residual"]:
                version *= np.float32(1e-40)
            written = compare(compiled, "cast", **case)
            decoding = uncast_case(case, written["payload"])
            compare(compiled, "uncast", **decoding, scale=2.0)


def test_nothing_to_do_launches_nothing(emulated: Emulated) -> None:
    before = emulated.library.emulated_launches()
    for lengths in ([], [0], [0, 0, 0]):
        case = cast_case("float32", "float16", lengths)
        case["spans"]["body"], case["payload"] = 0, np.zeros(0, np.uint8)
        compare(emulated, "cast", **case)
        compare(emulated, "uncast", **uncast_case(case, case["payload"]))
        compare(emulated, "recast_sum", **sum_case(case, 2))
        assert emulated.library.emulated_launches() == before
    compare(emulated, "cast", **cast_case("float32", "float16", [5]))
    assert emulated.library.emulated_launches() == before + 1


def test_empty_then_five(compiled: Any) -> None:
    """An empty call leaves no error behind for the next one."""
    compare(compiled, "cast", **cast_case("float32", "float16", [0]))
    compare(compiled, "cast", **cast_case("float32", "float16", [5]))


def test_conversions_keep_a_nan(emulated: Emulated) -> None:
    """The bits that stand in for the CPU's own conversion of a NaN are the CPU's."""
    random = np.random.default_rng(6)
    wide = random.integers(0, 2**64, 2000, np.uint64) | np.uint64(0x7FF0000000000001)
    with np.errstate(invalid="ignore"):
        narrow = wide.view(np.float64).astype(np.float32).view(np.uint32)
        back = narrow.view(np.float32).astype(np.float64).view(np.uint64)
    narrowed = [emulated.library.emulated_narrow(int(bits)) for bits in wide]
    assert narrowed == narrow.tolist()
    widened = [emulated.library.emulated_widen(int(bits)) for bits in narrow]
    assert widened == back.tolist()
