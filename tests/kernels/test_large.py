"""Results too large for the cache take other stores; their bits are the same."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import (
    Copies,
    assert_same,
    cast_body,
    make_spans,
    numbers,
    quantize_body,
    residuals,
)

from commkern import reference

FIXED = ("fixed_quantize", "fixed_dequantize")
KERNELS = ["quantize", "dequantize", *FIXED, "cast", "uncast", "sum", "hadamard"]
LENGTHS = [9, (1 << 21) + 4099]  # more than 8 MiB of fp32


@functools.cache
def case_of(kernel: str) -> dict[str, Any]:
    body = cast_body("float16")
    if kernel in ("quantize", "dequantize"):
        body = quantize_body(4, 128, "float32")
    if kernel in FIXED:
        body = lambda length: 2 * length
    # Gaps of whole vectors, so that an aligned buffer has aligned spans.
    spans, elements, nbytes, count = make_spans(LENGTHS, body, gap=16, body_gap=64)
    spans["residual"] = spans["offset"]
    data = np.resize(numbers(1, 50_000, "float32"), elements)
    payload = np.resize(numbers(2, 50_000, "float16"), nbytes // 2 + 1).view(np.uint8)
    case: dict[str, Any] = {"spans": spans, "dtype": "float32"}
    if kernel == "sum":
        return case | {"parts": [data, data[::-1].copy()], "output": data.copy()}
    if kernel == "hadamard":
        return case | {"input": data, "output": data[::-1].copy()}
    case["payload"] = payload
    if kernel in FIXED:
        spans["earlier"] = [0, 1]  # any bytes are exponents
    if kernel == "fixed_quantize":
        case["exponents"] = payload.copy()
    if kernel in ("quantize", "cast", "fixed_quantize"):
        versions = residuals(3, max(count, elements), in_place=False)
        case |= {"input": data, "residual": versions}
    else:
        case |= {"output": data, "nonfinite": np.zeros(len(LENGTHS), np.uint8)}
    if kernel in ("cast", "uncast"):
        return case | {"wire_dtype": "float16"}
    return case | {"bits": 16 if kernel in FIXED else 4}


@functools.cache
def expected(kernel: str) -> list[tuple[str, np.ndarray]]:
    copies = Copies(case_of(kernel), None)
    getattr(reference, kernel)(**copies.arguments)
    return copies.buffers()


@pytest.mark.parametrize("shift", [0, 4, 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_large_results(compiled: Any, kernel: str, shift: int) -> None:
    copies = Copies(case_of(kernel), shift)
    getattr(compiled, kernel)(**copies.arguments)
    copies.check_sentinels()
    for (label, got), (_, want) in zip(copies.buffers(), expected(kernel), strict=True):
        assert_same(got, want, f"{kernel}: {label}", _nan_view(kernel, label))


def _nan_view(kernel: str, label: str) -> str | None:
    """Random bytes as scales make NaNs by arithmetic."""
    random_scales = kernel in ("dequantize", "fixed_dequantize") and label.startswith(
        "output"
    )
    return "float32" if random_scales else None
