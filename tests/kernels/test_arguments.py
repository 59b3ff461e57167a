"""Refusals: caller mistakes raise, with both values in the text, before any write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.harness import filler
from tests.kernels.test_cast import cast_case, uncast_case
from tests.kernels.test_cast import sum_case as recast_case
from tests.kernels.test_feedback import accumulate_case, scale_case, subtract_case
from tests.kernels.test_fixed_point import decode_case as fixed_decode_case
from tests.kernels.test_fixed_point import exponents_case, fixed_case, max_case
from tests.kernels.test_fixed_point import sum_case as fixed_sum_case
from tests.kernels.test_quantize import decode_case, quantize_case
from tests.kernels.test_quantize import sum_case as requantize_case
from tests.kernels.test_reduce import spans_of, sum_case

from commkern.spans import SPAN


def cases() -> dict[str, dict[str, Any]]:
    """Valid arguments of every kernel: two spans of 40 and 7 elements, fp32."""
    quantizing = quantize_case("float32", 8, 16, [40, 7], "committed")
    casting = cast_case("float32", "float16", [40, 7], "committed")
    spans, elements = spans_of([40, 7])
    dense = {"spans": spans, "dtype": "float32"}
    data = np.ones(elements, np.float32)
    decoding = decode_case(quantizing, quantizing["payload"].copy())
    uncasting = uncast_case(casting, casting["payload"].copy())
    fixed = fixed_case("float32", 8, 16, [40, 7], "committed")
    fixed_decoding = fixed_decode_case(fixed, fixed["payload"].copy())
    return {
        "quantize": quantizing,
        "dequantize": decoding,
        "dequantize_add": decoding,
        "requantize_sum": requantize_case(quantizing, 2),
        "cast": casting,
        "uncast": uncasting,
        "uncast_add": uncasting,
        "recast_sum": recast_case(casting, 2),
        "residual_subtract": subtract_case("float32", [40, 7], "committed"),
        "residual_scale": scale_case([40, 7], "committed"),
        "accumulate": accumulate_case("float32", [40, 7], "committed"),
        "block_exponents": exponents_case(fixed),
        "max_exponents": max_case(fixed, 2),
        "fixed_quantize": fixed,
        "fixed_sum": fixed_sum_case(fixed, 2),
        "fixed_dequantize": fixed_decoding,
        "fixed_dequantize_add": fixed_decoding,
        "sum": sum_case("float32", [40, 7], 2),
        "absmax": dense | {"input": data, "output": filler(2, np.float32)},
        "nonfinite_check": dense | {"input": data, "flags": filler(2)},
        "nonzero_check": dense | {"input": data, "flags": filler(2)},
        "saturate": dense | {"data": data, "limit": 0.5},
        "hadamard": dense | {"input": data, "output": filler(elements, np.float32)},
    }


KERNELS = list(cases())
QUANTIZERS = ["quantize", "dequantize", "dequantize_add", "requantize_sum"]
FIXED_WITH_BITS = [
    "fixed_quantize",
    "fixed_sum",
    "fixed_dequantize",
    "fixed_dequantize_add",
]
WITH_BLOCKS = [name for name, fields in cases().items() if "block_size" in fields]
WITH_RESIDUAL = [name for name, fields in cases().items() if "residual" in fields]
WITH_PARTS = [name for name, fields in cases().items() if "parts" in fields]
WITH_DTYPE = [name for name, fields in cases().items() if "dtype" in fields]


def refused(implementation: Any, kernel: str, pattern: str, **changes: Any) -> None:
    """The call raises ValueError with ``pattern`` and writes nothing."""
    __tracebackhide__ = True
    arguments = cases()[kernel] | changes
    buffers = [value for value in arguments.values() if isinstance(value, np.ndarray)]
    before = [buffer.tobytes() for buffer in buffers]
    with pytest.raises(ValueError, match=pattern):
        getattr(implementation, kernel)(**arguments)
    assert [buffer.tobytes() for buffer in buffers] == before


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_cases_are_valid(implementation: Any, kernel: str) -> None:
    getattr(implementation, kernel)(**cases()[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_tables_and_spans(implementation: Any, kernel: str) -> None:
    none, arguments = np.zeros(0, SPAN), cases()[kernel]
    getattr(implementation, kernel)(**arguments | {"spans": none})
    for name in ("input", "payload", "output", "data", "flags", "exponents"):
        if name in arguments:
            arguments[name] = np.empty(0, np.uint8)
    getattr(implementation, kernel)(**arguments | {"spans": none})


@pytest.mark.parametrize("kernel", KERNELS)
def test_unknown_field(implementation: Any, kernel: str) -> None:
    with pytest.raises(TypeError, match=r"(?s)colour.*spans"):
        getattr(implementation, kernel)(**cases()[kernel], colour=3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_missing_field(implementation: Any, kernel: str) -> None:
    buffers = ("input", "exponents", "payload", "parts", "output", "data", "flags")
    for field in ("spans", *buffers):
        arguments = cases()[kernel]
        if arguments.pop(field, None) is not None:
            with pytest.raises(TypeError, match=rf"(?s){field}"):
                getattr(implementation, kernel)(**arguments)


@pytest.mark.parametrize("kernel", KERNELS)
def test_spans_of_another_type(implementation: Any, kernel: str) -> None:
    for wrong in (np.zeros(4, np.int64), [1, 2], None):
        with pytest.raises((TypeError, ValueError), match="spans"):
            getattr(implementation, kernel)(**cases()[kernel] | {"spans": wrong})


@pytest.mark.parametrize("kernel", WITH_DTYPE)
def test_unknown_dtype(implementation: Any, kernel: str) -> None:
    refused(implementation, kernel, r"(?s)float32.*'?int7'?", dtype="int7")


@pytest.mark.parametrize("bits", [0, 4, 7, 9, 24, 64, -8])
@pytest.mark.parametrize("kernel", FIXED_WITH_BITS)
def test_bits_of_fixed_point(implementation: Any, kernel: str, bits: int) -> None:
    refused(implementation, kernel, rf"bits.*8, 16, 32, got {bits}$", bits=bits)


@pytest.mark.parametrize(
    ("kernel", "field", "value", "most"),
    [
        ("fixed_quantize", "digits", 0, 7),
        ("fixed_quantize", "digits", 8, 7),
        ("fixed_dequantize", "digits", 31, 7),
        ("fixed_dequantize_add", "digits", -1, 7),
        ("fixed_quantize", "largest", 0, 127),
        ("fixed_quantize", "largest", 128, 127),
    ],
)
def test_digits_and_largest(
    implementation: Any, kernel: str, field: str, value: int, most: int
) -> None:
    pattern = rf"{field}.*1.*{most}, got {value}$"
    refused(implementation, kernel, pattern, **{field: value})


@pytest.mark.parametrize("bits", [0, 1, 9, 16, -8])
@pytest.mark.parametrize("kernel", QUANTIZERS)
def test_bits(implementation: Any, kernel: str, bits: int) -> None:
    refused(implementation, kernel, rf"bits.*2 ... 8.*got {bits}$", bits=bits)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"code": "nf5"}, r"(?s)symmetric.*nf4.*'nf5'"),
        ({"scales": "fp8"}, r"(?s)bfloat16.*'fp8'"),
        ({"scales": "ocp"}, r"scales.*symmetric.*bfloat16.*ocp"),
        ({"statistic": "mean"}, r"statistic.*symmetric.*absmax.*mean"),
        ({"code": "nf4", "bits": 8}, r"bits.*nf4.*4.*got 8"),
        ({"scales": "span", "block_size": 24}, r"block_size.*4096.*24"),
        ({"rotation": 48}, r"rotation.*32.*4096.*48"),
        ({"block_size": 48, "rotation": 32}, r"rotation.*block_size 48.*32"),
        (
            {"code": "threshold", "bits": 2, "scales": "span", "statistic": "constant"}
            | {"constant": 0.0},
            r"constant.*\(0, 1e.?38\).*0",
        ),
        (
            {"code": "sign", "bits": 1, "statistic": "constant", "constant": 1.0},
            r"scales.*span.*compute",
        ),
    ],
)
@pytest.mark.parametrize("kernel", QUANTIZERS)
def test_formats(
    implementation: Any, kernel: str, fields: dict[str, Any], pattern: str
) -> None:
    refused(implementation, kernel, pattern, **fields)


@pytest.mark.parametrize("kernel", ["quantize", "requantize_sum"])
def test_roundings_of_codes(implementation: Any, kernel: str) -> None:
    for fields, rounding, allowed in (
        ({"code": "float8_e4m3"}, "stochastic", "nearest"),
        ({"code": "ternary", "bits": 2}, "nearest", "stochastic"),
        ({"code": "sign", "bits": 1}, "nearest", "stochastic"),
        ({"code": "sign", "bits": 1, "statistic": "mean"}, "stochastic", "nearest"),
    ):
        pattern = rf"rounding.*{allowed}.*{rounding}"
        refused(implementation, kernel, pattern, rounding=rounding, **fields)


@pytest.mark.parametrize("field", ["bits", "block_size", "rotation"])
@pytest.mark.parametrize("kernel", QUANTIZERS)
def test_numbers_are_ints(implementation: Any, kernel: str, field: str) -> None:
    with pytest.raises(TypeError, match=f"{field}.*int"):
        getattr(implementation, kernel)(**cases()[kernel] | {field: 32.5})


@pytest.mark.parametrize("block_size", [0, -16, 8, 12, 20, 100, 8200, 1 << 20])
@pytest.mark.parametrize("kernel", WITH_BLOCKS)
def test_block_size(implementation: Any, kernel: str, block_size: int) -> None:
    pattern = rf"block_size.*multiple of 8 in 16.*8192, got {block_size}$"
    refused(implementation, kernel, pattern, block_size=block_size)


@pytest.mark.parametrize("kernel", WITH_BLOCKS)
def test_begin_within_a_block(implementation: Any, kernel: str) -> None:
    spans = cases()[kernel]["spans"].copy()
    spans[1]["begin"] = 24
    refused(implementation, kernel, r"begin.*16.*24", spans=spans)


@pytest.mark.parametrize(
    "field", ["offset", "length", "body", "earlier", "residual", "begin"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_negative_positions(implementation: Any, kernel: str, field: str) -> None:
    spans = cases()[kernel]["spans"].copy()
    spans[1][field] = -16
    refused(implementation, kernel, rf"(?s)1.*{field}.*-16", spans=spans)


@pytest.mark.parametrize("far", [10**6, 2**62, 2**63 - 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_positions_beyond_the_buffers(
    implementation: Any, kernel: str, far: int
) -> None:
    fields = ["length"]
    arguments = cases()[kernel]
    if "payload" in arguments:
        fields.append("body")
    if kernel in WITH_RESIDUAL:
        fields.append("residual")
    if kernel in ("fixed_quantize", "fixed_dequantize", "fixed_dequantize_add"):
        fields.append("earlier")
    if any(name in arguments for name in ("input", "data", "output")):
        fields.append("offset")
    for field in fields:
        spans = arguments["spans"].copy()
        spans[1][field] = far
        refused(implementation, kernel, r"\d", spans=spans)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_byte_too_few(implementation: Any, kernel: str) -> None:
    """Each buffer in turn ends one byte before the last span does."""
    arguments = cases()[kernel]
    last = arguments["spans"][1]
    buffers = ("input", "exponents", "payload", "output", "data", "flags", "nonfinite")
    for name in buffers:
        if arguments.get(name) is None:
            continue
        raw = arguments[name].view(np.uint8)
        held = _needed(kernel, name, arguments, last)
        arguments[name] = raw[: held - 1].copy()
        refused(implementation, kernel, rf"{name}|{held}.*{held - 1}", **arguments)
        arguments[name] = raw


def _needed(kernel: str, name: str, arguments: dict[str, Any], last: Any) -> int:
    if name in ("flags", "nonfinite"):
        return 2
    if name == "output" and kernel == "absmax":
        return 8
    decodes = name == "payload" and kernel.startswith("fixed_dequantize")
    if name == "exponents" or decodes:
        return int(last["earlier"]) + 1
    if name != "payload":
        return int(last["offset"] + 7) * 4
    bodies = {"block_exponents": 1, "max_exponents": 1}
    bodies |= {"fixed_quantize": 7, "fixed_sum": 7}
    body = bodies.get(kernel, 14 if "wire_dtype" in arguments else 4 + 7)
    return int(last["body"]) + body


@pytest.mark.parametrize("kernel", WITH_RESIDUAL)
def test_residuals(implementation: Any, kernel: str) -> None:
    version0, version1, committed = cases()[kernel]["residual"]
    short = max(cases()[kernel]["spans"]["residual"] + [40, 7]) - 1
    for residual, pattern in (
        ((version0[:short].copy(), version1), rf"{4 * (short + 1)}.*{4 * short}"),
        ((version0, version1[:short].copy()), rf"{4 * (short + 1)}.*{4 * short}"),
        ((version0, version1, committed[:1].copy()), "committed"),
    ):
        refused(implementation, kernel, pattern, residual=residual)
    refused(implementation, kernel, "residual.*of 1", residual=(version0,))
    for wrong in (version0, "zero", 3):
        with pytest.raises((TypeError, ValueError)):
            getattr(implementation, kernel)(**cases()[kernel] | {"residual": wrong})


@pytest.mark.parametrize("kernel", WITH_PARTS)
def test_parts(implementation: Any, kernel: str) -> None:
    refused(implementation, kernel, "at least 1.*got 0", parts=[])
    arguments = cases()[kernel]
    short = arguments["parts"][1].view(np.uint8)[:7].copy()
    refused(
        implementation, kernel, r"parts\[1\].*7", parts=[arguments["parts"][0], short]
    )


@pytest.mark.parametrize("wire_scale", [0.0, 0.75, 2.0, -0.5, 2.0**-127, np.nan])
def test_wire_scale(implementation: Any, wire_scale: float) -> None:
    refused(implementation, "recast_sum", "power of two.*got", wire_scale=wire_scale)


@pytest.mark.parametrize("limit", [-1.0, np.nan, -np.inf])
def test_limit(implementation: Any, limit: float) -> None:
    refused(implementation, "saturate", "limit.*>= 0.*got", limit=limit)


@pytest.mark.parametrize("kernel", ["quantize", "requantize_sum", "fixed_quantize"])
def test_rounding_and_words(implementation: Any, kernel: str) -> None:
    refused(implementation, kernel, r"(?s)nearest.*stochastic.*up", rounding="up")
    for field, value in (("seed", 1 << 64), ("step", 1 << 32), ("stream", -1)):
        refused(implementation, kernel, rf"{field}.*{value}", **{field: value})


@pytest.mark.parametrize("kernel", KERNELS)
def test_read_only_outputs(implementation: Any, kernel: str) -> None:
    arguments = cases()[kernel]
    outputs = {"payload", "output", "flags", "data", "nonfinite"}
    if "output" in arguments:
        outputs.remove("payload")
    for name in outputs & set(arguments):
        locked = arguments[name].copy()
        locked.flags.writeable = False
        refused(implementation, kernel, "(?i)read-only|writ", **{name: locked})
