"""Compiled passes over residuals and running sums against the reference, in bits."""

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
from tests.kernels.test_quantize import VECTOR, feedback_of

from commkern.reference.numerics import FORMATS

LENGTHS = [0, 1, 15, 16, 17, 64, 257, 1031]
KINDS = ("in place", "two versions", "committed")
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 65504.0, 65520.0, 3.4e38, 1e300]


def wide(dtype: str) -> str:
    """The compute type."""
    return "float64" if dtype == "float64" else "float32"


def subtract_case(dtype: str, lengths: list[int], kind: str) -> dict[str, Any]:
    spans, elements, _, count = make_spans(lengths, lambda length: 0, shuffle=True)
    return {
        "spans": spans,
        "input": numbers(1, elements, dtype),
        "dtype": dtype,
        "residual": feedback_of(kind, count, len(lengths)),
    }


def scale_case(lengths: list[int], kind: str) -> dict[str, Any]:
    case = subtract_case("float32", lengths, kind)
    return {name: case[name] for name in ("spans", "residual")} | {"factor": 0.9}


def accumulate_case(dtype: str, lengths: list[int], kind: str) -> dict[str, Any]:
    case = subtract_case(dtype, lengths, kind)
    elements = len(case["input"])
    return case | {
        "input": numbers(2, elements, wide(dtype)),
        "output": filler(elements, FORMATS[dtype].storage),
        "nonfinite": np.zeros(len(lengths), np.uint8),
    }


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel(compiled: Any, dtype: str, shift: int) -> None:
    for kind in KINDS:
        case = subtract_case(dtype, LENGTHS, kind)
        compare(compiled, "residual_subtract", shift=shift, **case)
        compare(compiled, "residual_scale", shift=shift, **scale_case(LENGTHS, kind))
        case = accumulate_case(dtype, LENGTHS, kind)
        compare(compiled, "accumulate", shift=shift, **case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(compiled: Any, dtype: str) -> None:
    lengths = list(range(2 * VECTOR + 2))
    case = subtract_case(dtype, lengths, "committed")
    compare(compiled, "residual_subtract", **case)
    compare(compiled, "residual_scale", **scale_case(lengths, "committed"))
    case = accumulate_case(dtype, lengths, "committed")
    compare(compiled, "accumulate", **case)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_accumulate_onto_its_input(compiled: Any, dtype: str) -> None:
    case = accumulate_case(dtype, LENGTHS, "two versions")
    apart = compare(compiled, "accumulate", **case)["output"]
    onto = compare(compiled, "accumulate", **case | {"output": case["input"]})
    for span in case["spans"]:
        piece = slice(span["offset"], span["offset"] + span["length"])
        np.testing.assert_array_equal(onto["output"][piece], apart[piece])


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_values(compiled: Any, dtype: str) -> None:
    """At every place of a vector, between ordinary numbers."""
    lengths = [40 * len(SPECIAL), 5]
    for build, kernel in (
        (subtract_case, "residual_subtract"),
        (accumulate_case, "accumulate"),
    ):
        case = build(dtype, lengths, "two versions")
        held = wide(dtype) if kernel == "accumulate" else dtype
        values = np.random.default_rng(3).standard_normal(len(case["input"]))
        values[3 : 3 + 40 * len(SPECIAL) : 40] = SPECIAL
        case["input"] = encode(values, held)
        got = compare(compiled, kernel, nan_view={"output": dtype}, **case)
        assert np.isfinite(got["residual"][0]).all()
        assert np.isfinite(got["residual"][1]).all()
        if kernel == "accumulate":
            assert got["nonfinite"].tolist() == [1, 0]
            assert not np.isfinite(decode(got["output"][3:4], dtype)).any()


def one_span(length: int) -> np.ndarray:
    spans, _, _, _ = make_spans([length], lambda _: 0)
    return spans


def test_values(implementation: Any) -> None:
    """By hand; the version that a step writes is the one that is not committed."""
    spans = one_span(3)
    at = slice(int(spans[0]["residual"]), int(spans[0]["residual"]) + 3)
    place = slice(int(spans[0]["offset"]), int(spans[0]["offset"]) + 3)
    written, read = np.full(6, 7, np.float32), np.full(6, 9, np.float32)
    written[at], read[at] = [1.0, -2.0, 3e38], [0.5, 0.5, 0.5]
    residual = (written, read, np.ones(1, np.uint8))  # version 1 is committed
    x = np.full(6, np.nan, np.float32)
    x[place] = [0.25, np.inf, -3e38]
    one = {"spans": spans, "residual": residual}
    implementation.residual_subtract(**one, input=x, dtype="float32")
    # What is not finite stays: 3e38 + 3e38 overflows.
    assert written[at].tolist() == [0.75, -2.0, np.float32(3e38)]
    implementation.residual_scale(**one, factor=0.5)
    assert written[at].tolist() == [0.375, -1.0, np.float32(1.5e38)]
    assert read[at].tolist() == [0.5, 0.5, 0.5]
    output, flags = np.zeros(6, np.float32), np.zeros(1, np.uint8)
    implementation.accumulate(
        **one, input=x, output=output, dtype="float32", nonfinite=flags
    )
    assert output[place].tolist() == [0.75, np.inf, np.float32(-3e38)]
    assert written[at].tolist() == [0.75, 0.5, np.float32(-3e38)]
    assert flags.tolist() == [1]
    assert set(np.delete(written, range(at.start, at.stop)).tolist()) == {7.0}


def test_accumulate_keeps_what_16_bits_round_away(implementation: Any) -> None:
    spans = one_span(1)
    versions = np.zeros(4, np.float32), np.zeros(4, np.float32)
    step = np.full(4, 2.0**-10, np.float32)
    output = np.zeros(4, np.uint16)
    flag = np.zeros(1, np.uint8)
    for _ in range(1024):
        implementation.accumulate(
            spans=spans,
            input=step,
            output=output,
            dtype="bfloat16",
            residual=(*versions, flag),
        )
        flag ^= 1
    assert decode(output, "bfloat16")[3] == 1.0


@pytest.mark.parametrize("factor", [np.nan, np.inf])
def test_factor_is_finite(implementation: Any, factor: float) -> None:
    with pytest.raises(ValueError, match=r"factor.*finite.*got"):
        implementation.residual_scale(
            **scale_case([3], "two versions") | {"factor": factor}
        )


@pytest.mark.parametrize(
    "kernel", ["residual_subtract", "residual_scale", "accumulate"]
)
def test_residual_is_needed(implementation: Any, kernel: str) -> None:
    case = accumulate_case("float32", [3], "two versions")
    fields = {"residual_subtract": ("spans", "input", "dtype")}
    fields |= {"residual_scale": ("spans",), "accumulate": tuple(case)}
    given = {name: case[name] for name in fields[kernel] if name != "residual"}
    with pytest.raises(ValueError, match=r"residual.*two versions"):
        getattr(implementation, kernel)(**given)
