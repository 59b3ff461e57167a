"""Small calls of every kernel, compared with the reference byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from commkern import reference
from commkern.arrays import as_bytes
from commkern.spans import SpanTable, span_table
from commkern.wire.dtypes import compute_nbytes

DTYPES = ("float32", "float64", "float16", "bfloat16")
_LENGTHS = (640, 361)  # of two parameters: whole blocks, and a tail
_BITS = 4
_BLOCK_SIZE = 64

Arguments = dict[str, Any]
Kernel = Callable[..., None]


def differences(compiled: Any) -> Iterator[tuple[str, str | None]]:
    """Yield (kernel, None or what differs) for every kernel of the reference."""
    for name in reference.KERNELS:
        problem = None
        for dtype in DTYPES:
            problem = problem or _difference(name, getattr(compiled, name), dtype)
        yield name, problem


def _difference(name: str, kernel: Kernel, dtype: str) -> str | None:
    expected, actual = _arguments(name, dtype), _arguments(name, dtype)
    getattr(reference, name)(**expected)
    kernel(**actual)
    for field in expected:
        pairs = zip(_buffers(expected[field]), _buffers(actual[field]), strict=True)
        for want, got in pairs:
            wrong = np.flatnonzero(want != got)
            if wrong.size:
                return (
                    f"{dtype}: byte {wrong[0]} of {field} is {got[wrong[0]]}, "
                    f"the reference has {want[wrong[0]]} ({wrong.size} bytes differ)"
                )
    return None


def _buffers(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [as_bytes(item) for item in value]
    return [as_bytes(value)] if isinstance(value, (torch.Tensor, np.ndarray)) else []


def _arguments(name: str, dtype: str) -> Arguments:
    """Fresh, equal arguments at every call."""
    typed = {"dtype": dtype} if "dtype" in getattr(reference, name).fields else {}
    return _BUILDERS[name](dtype) | typed


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


def _quantize_sizes(dtype: str) -> list[int]:
    scale = compute_nbytes(dtype)
    sizes = [
        -(-n // _BLOCK_SIZE) * scale + -(-n * _BITS // 8) for n in _LENGTHS
    ]  # fmt: skip
    return [-(-size // scale) * scale for size in sizes]


def _quantize_format(dtype: str) -> Arguments:
    spans = _spans((0, _quantize_sizes(dtype)[0]))
    return {"spans": spans, "bits": _BITS, "block_size": _BLOCK_SIZE}


def _quantize_coding(dtype: str) -> Arguments:
    return _quantize_format(dtype) | {
        "payload": _zeros(sum(_quantize_sizes(dtype))),
        "residual": _residual(),
        "rounding": "stochastic",
        "seed": 2**40 + 7,
        "step": 3,
        "stream": 1 << 24,
    }


def _quantize(dtype: str, seed: int = 1) -> Arguments:
    return _quantize_coding(dtype) | {"input": _values(dtype, seed)}


def _quantized(dtype: str, seed: int) -> Any:
    arguments = _quantize(dtype, seed)
    reference.quantize(**arguments, dtype=dtype)
    return arguments["payload"]


def _dequantize(dtype: str) -> Arguments:
    return _quantize_format(dtype) | {
        "payload": _quantized(dtype, 1),
        "output": _values(dtype, 2),
        "scale": 1 / 3,
        "nonfinite": _zeros(2),
    }


def _requantize_sum(dtype: str) -> Arguments:
    parts = [_quantized(dtype, seed) for seed in range(3)]
    return _quantize_coding(dtype) | {"parts": parts}


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


_BUILDERS: dict[str, Callable[[str], Arguments]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "dequantize_add": _dequantize,
    "requantize_sum": _requantize_sum,
    "cast": _cast,
    "uncast": _uncast,
    "uncast_add": _uncast,
    "recast_sum": _recast_sum,
    "block_exponents": _block_exponents,
    "max_exponents": _max_exponents,
    "fixed_quantize": _fixed_quantize,
    "fixed_sum": _fixed_sum,
    "fixed_dequantize": _fixed_dequantize,
    "fixed_dequantize_add": _fixed_dequantize,
    "sum": _sum,
    "absmax": _absmax,
    "nonfinite_check": _flags,
    "nonzero_check": _flags,
    "saturate": _saturate,
}
