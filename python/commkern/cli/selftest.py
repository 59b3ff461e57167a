"""Small calls of every kernel, compared with the reference byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from commkern import reference
from commkern.arrays import as_bytes
from commkern.formats import Format
from commkern.spans import SpanTable, span_table
from commkern.wire.dtypes import compute_nbytes
from commkern.wire.message import align

DTYPES = ("float32", "float64", "float16", "bfloat16")
_LENGTHS = (640, 361)  # of two parameters: whole blocks, and a tail
_BLOCK_SIZE = 64  # of fixed point
# One for every code, and one for every kind of scale, statistic and rotation.
_FORMATS = (
    (Format(bits=4, block_size=64), "stochastic"),
    (Format(bits=3, block_size=64, scales="float16", rotation=128), "nearest"),
    (Format(bits=5, block_size=64, scales="bfloat16", statistic="l2"), "stochastic"),
    (Format("asymmetric", 6, 64, statistic="range"), "nearest"),
    (Format("asymmetric", 1, 64, "span", "range"), "stochastic"),
    (Format("sign", 1, 64, "span", "mean"), "nearest"),
    (Format("ternary", 2, 64, "span"), "stochastic"),
    (Format("threshold", 2, 64, "span", "constant", constant=0.5), "nearest"),
    (Format("natural", 8, 64, "e8m0"), "stochastic"),
    (Format("float8_e4m3", 8, 64, "e8m0"), "nearest"),
    (Format("float8_e5m2", 8, 64, rotation=32), "nearest"),
    (Format("float6_e3m2", 6, 64, "ocp"), "nearest"),
    (Format("float6_e2m3", 6, 64, "ocp"), "nearest"),
    (Format("float4_e2m1", 4, 16, "e4m3"), "nearest"),
    (Format("nf4", 4, 64), "nearest"),
    (Format("dynamic8", 8, 64), "nearest"),
)

Arguments = dict[str, Any]
Kernel = Callable[..., None]
# Fresh, equal arguments at every call, for each of a kernel's variants.
Builder = Callable[[str], list[Arguments]]


def differences(compiled: Any) -> Iterator[tuple[str, str | None]]:
    """Yield (kernel, None or what differs) for every kernel of the reference."""
    for name in reference.KERNELS:
        kernel, build = getattr(compiled, name), _BUILDERS[name]
        found = (_difference(name, kernel, build, dtype) for dtype in DTYPES)
        yield name, next((problem for problem in found if problem), None)


def _difference(name: str, kernel: Kernel, build: Builder, dtype: str) -> str | None:
    pairs = zip(build(dtype), build(dtype), strict=True)
    also = typed(name, dtype)
    for expected, actual in pairs:
        problem = _compared(name, kernel, expected | also, actual | also)
        if problem:
            return f"{dtype}{_code_of(actual)}: {problem}"
    return None


def typed(name: str, dtype: str) -> Arguments:
    """The dtype, for a kernel that takes one: sums of integers do not."""
    return {"dtype": dtype} if "dtype" in getattr(reference, name).fields else {}


def _code_of(arguments: Arguments) -> str:
    return f", {arguments['code']}" if "code" in arguments else ""


def _compared(
    name: str, kernel: Kernel, expected: Arguments, actual: Arguments
) -> str | None:
    getattr(reference, name)(**expected)
    kernel(**actual)
    for field in expected:
        pairs = zip(_buffers(expected[field]), _buffers(actual[field]), strict=True)
        for want, got in pairs:
            wrong = np.flatnonzero(want != got)
            if wrong.size:
                return (
                    f"byte {wrong[0]} of {field} is {got[wrong[0]]}, "
                    f"the reference has {want[wrong[0]]} ({wrong.size} bytes differ)"
                )
    return None


def _buffers(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [as_bytes(item) for item in value]
    return [as_bytes(value)] if isinstance(value, (torch.Tensor, np.ndarray)) else []


def _values(dtype: str, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    values = random.standard_normal(sum(_LENGTHS))
    return torch.from_numpy(values).to(getattr(torch, dtype))


def _zeros(nbytes: int) -> Any:
    return np.zeros(nbytes, dtype=np.uint8)


def _spans(bodies: tuple[int, int] = (0, 0)) -> SpanTable:
    first, second = _LENGTHS
    return span_table(
        [
            {"length": first, "parameter_id": 11, "body": bodies[0]},
            {
                "offset": first,
                "length": second,
                "body": bodies[1],
                "residual": first,
                "parameter_id": 12,
                "parameter": 1,
            },
        ]
    )


def _residual() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(5)
    old = (random.standard_normal(sum(_LENGTHS)) / 16).astype(np.float32)
    return old, np.zeros_like(old), _zeros(len(_LENGTHS))


# --- quantize -------------------------------------------------------------------------


def _bodies(fmt: Format, dtype: str) -> list[int]:
    """Where the two bodies start, and where the second ends."""
    first, second = (fmt.body_nbytes(length, dtype) for length in _LENGTHS)
    start = align(first, fmt.alignment(dtype))
    return [0, start, start + second]


def _format_fields(fmt: Format, dtype: str) -> Arguments:
    first, second, _ = _bodies(fmt, dtype)
    return {"spans": _spans((first, second))} | fmt.fields()


def _coding(fmt: Format, rounding: str, dtype: str) -> Arguments:
    return _format_fields(fmt, dtype) | {
        "payload": _zeros(_bodies(fmt, dtype)[-1]),
        "residual": _residual(),
        "rounding": rounding,
        "seed": 2**40 + 7,
        "step": 3,
        "stream": 1 << 24,
    }


def _quantize(fmt: Format, rounding: str, dtype: str, seed: int = 1) -> Arguments:
    return _coding(fmt, rounding, dtype) | {"input": _values(dtype, seed)}


def _quantized(fmt: Format, rounding: str, dtype: str, seed: int) -> Any:
    arguments = _quantize(fmt, rounding, dtype, seed)
    reference.quantize(**arguments, dtype=dtype)
    return arguments["payload"]


def _dequantize(fmt: Format, rounding: str, dtype: str) -> Arguments:
    return _format_fields(fmt, dtype) | {
        "payload": _quantized(fmt, rounding, dtype, 1),
        "output": _values(dtype, 2),
        "scale": 1 / 3,
        "nonfinite": _zeros(2),
    }


def _requantize_sum(fmt: Format, rounding: str, dtype: str) -> Arguments:
    parts = [_quantized(fmt, rounding, dtype, seed) for seed in range(3)]
    return _coding(fmt, rounding, dtype) | {"parts": parts}


def _every_format(build: Callable[..., Arguments]) -> Builder:
    """All of them for both compute types; what 16-bit data adds, one format shows."""

    def built(dtype: str) -> list[Arguments]:
        wide = dtype in ("float32", "float64")
        chosen = _FORMATS if wide else _FORMATS[:1]
        return [build(fmt, rounding, dtype) for fmt, rounding in chosen]

    return built


def _only(build: Callable[[str], Arguments]) -> Builder:
    return lambda dtype: [build(dtype)]


# --- cast -----------------------------------------------------------------------------


def _wire(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else "bfloat16"


def _cast_format(dtype: str) -> Arguments:
    return {"spans": _spans((0, 2 * _LENGTHS[0])), "wire_dtype": _wire(dtype)}


def _cast_payload(dtype: str, seed: int) -> torch.Tensor:
    return _values(_wire(dtype), seed)


def _cast(dtype: str) -> Arguments:
    return _cast_format(dtype) | {
        "input": _values(dtype, 1),
        "payload": _zeros(2 * sum(_LENGTHS)),
        "residual": _residual(),
    }


def _uncast(dtype: str) -> Arguments:
    return _cast_format(dtype) | {
        "payload": _cast_payload(dtype, 1),
        "output": _values(dtype, 2),
        "scale": 1 / 3,
        "nonfinite": _zeros(2),
    }


def _recast_sum(dtype: str) -> Arguments:
    return _cast_format(dtype) | {
        "parts": [_cast_payload(dtype, seed) for seed in range(3)],
        "payload": _zeros(2 * sum(_LENGTHS)),
        "residual": _residual(),
        "wire_scale": 0.25,
    }


# --- feedback -------------------------------------------------------------------------


def _written_residual() -> tuple[Any, Any, Any]:
    old, new, committed = _residual()
    return old, new + 1 / 3, committed


def _residual_subtract(dtype: str) -> Arguments:
    fields = {"input": _values(dtype, 1), "residual": _written_residual()}
    return {"spans": _spans()} | fields


def _residual_scale(_: str) -> Arguments:
    return {"spans": _spans(), "residual": _written_residual(), "factor": 0.9}


def _accumulate(dtype: str) -> Arguments:
    wide = "float64" if dtype == "float64" else "float32"
    return {
        "spans": _spans(),
        "input": _values(wide, 1),
        "output": _values(dtype, 2),
        "residual": _residual(),
        "nonfinite": _zeros(2),
    }


# --- fixed point ----------------------------------------------------------------------


def _fixed_spans(stage: int) -> SpanTable:
    """Codes behind the exponents of up to two bytes a block."""
    blocks = [2 * -(-n // _BLOCK_SIZE) for n in _LENGTHS]
    exponents, codes = (0, blocks[0]), (sum(blocks), sum(blocks) + 2 * _LENGTHS[0])
    spans = _spans(codes if stage else exponents)
    spans["earlier"] = exponents
    return spans


def _fixed_format(stage: int) -> Arguments:
    bits = {"bits": 16, "digits": 13} if stage else {}
    return {"spans": _fixed_spans(stage), "block_size": _BLOCK_SIZE} | bits


def _fixed_payload() -> Any:
    *_, last = _fixed_spans(1)
    return _zeros(int(last["body"]) + 2 * int(last["length"]))


def _block_exponents(dtype: str, seed: int = 1) -> Arguments:
    fields = {"input": _values(dtype, seed), "residual": _residual()}
    return _fixed_format(0) | fields | {"payload": _fixed_payload()}


def _exponents(dtype: str, seed: int) -> Any:
    arguments = _block_exponents(dtype, seed)
    reference.block_exponents(**arguments, dtype=dtype)
    return arguments["payload"]


def _max_exponents(dtype: str) -> Arguments:
    parts = [_exponents(dtype, seed) for seed in range(3)]
    return _fixed_format(0) | {"parts": parts, "payload": _fixed_payload()}


def _fixed_quantize(dtype: str, seed: int = 1) -> Arguments:
    return _fixed_format(1) | {
        "input": _values(dtype, seed),
        "exponents": _exponents(dtype, seed),
        "payload": _fixed_payload(),
        "residual": _residual(),
        "largest": 8191,
        "rounding": "stochastic",
        "seed": 2**40 + 7,
        "step": 3,
        "stream": 1 << 24,
    }


def _fixed_coded(dtype: str, seed: int) -> Any:
    arguments = _fixed_quantize(dtype, seed)
    arguments["payload"] = arguments["exponents"]  # exponents and codes in one
    reference.fixed_quantize(**arguments, dtype=dtype)
    return arguments["payload"]


def _fixed_sum(dtype: str) -> Arguments:
    parts = [_fixed_coded(dtype, seed) for seed in range(3)]
    fields = {"spans": _fixed_spans(1), "bits": 16}
    return fields | {"parts": parts, "payload": _fixed_payload()}


def _fixed_dequantize(dtype: str) -> Arguments:
    return _fixed_format(1) | {
        "payload": _fixed_coded(dtype, 1),
        "output": _values(dtype, 2),
        "scale": 1 / 3,
        "nonfinite": _zeros(2),
    }


# --- dense ----------------------------------------------------------------------------


def _sum(dtype: str) -> Arguments:
    return {
        "spans": _spans(),
        "parts": [_values(dtype, seed) for seed in range(3)],
        "output": _values(dtype, 4),
        "scale": 1 / 3,
    }


def _absmax(dtype: str) -> Arguments:
    output = _zeros(2 * compute_nbytes(dtype))
    return {"spans": _spans(), "input": _values(dtype, 1), "output": output}


def _flags(dtype: str) -> Arguments:
    values = _values(dtype, 1)
    values[: _LENGTHS[0]] = 0.0
    values[-1] = float("inf")
    return {"spans": _spans(), "input": values, "flags": _zeros(2)}


def _saturate(dtype: str) -> Arguments:
    values = _values(dtype, 1)
    values[3], values[700] = float("nan"), float("-inf")
    return {"spans": _spans(), "data": values, "limit": 0.75}


def _hadamard(dtype: str) -> Arguments:
    values, output = _values(dtype, 1), _values(dtype, 2)
    return {"spans": _spans(), "input": values, "output": output, "seed": 2**40 + 7}


_BUILDERS: dict[str, Builder] = {
    "quantize": _every_format(_quantize),
    "dequantize": _every_format(_dequantize),
    "dequantize_add": _every_format(_dequantize),
    "requantize_sum": _every_format(_requantize_sum),
    "cast": _only(_cast),
    "uncast": _only(_uncast),
    "uncast_add": _only(_uncast),
    "recast_sum": _only(_recast_sum),
    "residual_subtract": _only(_residual_subtract),
    "residual_scale": _only(_residual_scale),
    "accumulate": _only(_accumulate),
    "block_exponents": _only(_block_exponents),
    "max_exponents": _only(_max_exponents),
    "fixed_quantize": _only(_fixed_quantize),
    "fixed_sum": _only(_fixed_sum),
    "fixed_dequantize": _only(_fixed_dequantize),
    "fixed_dequantize_add": _only(_fixed_dequantize),
    "sum": _only(_sum),
    "absmax": _only(_absmax),
    "nonfinite_check": _only(_flags),
    "nonzero_check": _only(_flags),
    "saturate": _only(_saturate),
    "hadamard": _only(_hadamard),
}
