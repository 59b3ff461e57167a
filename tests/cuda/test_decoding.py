"""The CUDA decoders against the reference, in bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import DTYPES, MISALIGNMENTS, compare, encode
from tests.kernels.test_formats import (
    awkward_blocks,
    decoding_case,
    every_format,
    format_case,
    formats,
    test_any_bytes_decode,
)
from tests.kernels.test_quantize import test_dequantize, test_dequantize_takes_any_bytes

from commkern import reference
from commkern.formats import Format

__all__ = [
    "test_any_bytes_decode",
    "test_dequantize",
    "test_dequantize_takes_any_bytes",
]

KERNELS = ("dequantize", "dequantize_add")
SHORT = 19  # elements: two threads' and a bit


def decoding_of(fmt: Format, dtype: str, lengths: list[int], **given: Any) -> Any:
    case = format_case(fmt, dtype, lengths) | given
    reference.quantize(**case)
    return decoding_case(fmt, case, case["payload"])


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(compiled: Any, fmt: Format, dtype: str) -> None:
    """Every length within a block, and what ends a little before or behind one."""
    size = fmt.block_size
    ends = [blocks * size + n for blocks in (1, 2) for n in (-1, 0, 1, 6)]
    decoding = decoding_of(fmt, dtype, [*range(SHORT), 33, 34, *ends])
    for kernel in KERNELS:
        compare(compiled, kernel, **decoding, scale=1 / 3)


@pytest.mark.parametrize("shift", MISALIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_buffers(compiled: Any, dtype: str, shift: int) -> None:
    for fmt in formats():
        decoding = decoding_of(fmt, dtype, [71, 24, 149])
        for kernel in KERNELS:
            compare(compiled, kernel, shift=shift, **decoding)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
def test_awkward_values(compiled: Any, fmt: Format, dtype: str) -> None:
    """Scales that are NaN, tiny or huge; halved blocks; factors that overflow."""
    for values in awkward_blocks(fmt, dtype):
        data = encode(np.concatenate([np.zeros(3), values]), dtype)
        decoding = decoding_of(fmt, dtype, [data.size - 3], input=data)
        for kernel in KERNELS:
            for scale in (1.0, -3.0):
                view = {"output": dtype}
                compare(compiled, kernel, nan_view=view, **decoding, scale=scale)


@every_format
def test_more_tiles_than_blocks(compiled: Any, fmt: Format) -> None:
    """Rows that several blocks share, and blocks that take several rows."""
    larger = replace(fmt, block_size=1024)
    decoding = decoding_of(larger, "bfloat16", [70_001, 0, 2048, 8192 * 3 + 9])
    for kernel in KERNELS:
        compare(compiled, kernel, **decoding, scale=0.125)


@every_format
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_scale_that_is_not_finite_raises_its_flag(
    compiled: Any, fmt: Format, dtype: str
) -> None:
    case = format_case(fmt, dtype, [fmt.block_size * 2, fmt.block_size + 9, 8])
    second = int(case["spans"][1]["offset"])
    case["input"][second + fmt.block_size + 3] = encode(np.array([np.inf]), dtype)[0]
    reference.quantize(**case)
    decoding = decoding_case(fmt, case, case["payload"])
    written = compare(compiled, "dequantize", nan_view={"output": dtype}, **decoding)
    assert written["nonfinite"].tolist() == [0, 1, 0]
