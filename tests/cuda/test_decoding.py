"""The CUDA decoders against the reference, in bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import DTYPES, MISALIGNMENTS, compare
from tests.kernels.test_quantize import (
    BITS,
    VECTOR,
    decode_case,
    quantize_case,
    test_dequantize,
    test_dequantize_takes_any_bytes,
)

from commkern import reference

__all__ = ["test_dequantize", "test_dequantize_takes_any_bytes"]

KERNELS = ("dequantize", "dequantize_add")


def decoding_of(dtype: str, bits: int, block_size: int, lengths: list[int]) -> Any:
    case = quantize_case(dtype, bits, block_size, lengths)
    reference.quantize(**case)
    return decode_case(case, case["payload"])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(compiled: Any, dtype: str, bits: int) -> None:
    decoding = decoding_of(dtype, bits, 32, list(range(2 * VECTOR + 2)))
    for kernel in KERNELS:
        compare(compiled, kernel, **decoding, scale=1 / 3)


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_buffers(compiled: Any, dtype: str, shift: int) -> None:
    for bits in BITS:
        decoding = decoding_of(dtype, bits, 24, [71, 24, 149])
        for kernel in KERNELS:
            compare(compiled, kernel, shift=shift, **decoding)


@pytest.mark.parametrize("bits", BITS)
def test_more_tiles_than_blocks(compiled: Any, bits: int) -> None:
    decoding = decoding_of("bfloat16", bits, 128, [70_001, 0, 2048, 8192 * 3 + 9])
    for kernel in KERNELS:
        compare(compiled, kernel, **decoding, scale=0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_not_finite_raises_its_flag(compiled: Any, dtype: str) -> None:
    case = quantize_case(dtype, 8, 16, [40, 33, 8])
    second = int(case["spans"][1]["offset"])
    case["input"][second + 32] = (
        np.inf
        if case["input"].dtype.kind == "f"
        else {"float16": 0x7C00}.get(dtype, 0x7F80)
    )
    reference.quantize(**case)
    decoding = decode_case(case, case["payload"])
    written = compare(compiled, "dequantize", nan_view={"output": dtype}, **decoding)
    assert written["nonfinite"].tolist() == [0, 1, 0]
