"""The compiled kernels as functions: ``commkern.kernels.quantize(spans=..., ...)``.

Each name of csrc/kernels/kernel_table.h is a function that takes the fields of its
argument struct as keywords; the contract is the comment on that struct. Buffers are
contiguous CPU tensors or arrays of any dtype, or ``(pointer, nbytes)`` tuples, seen as
raw bytes; ``spans`` is an array of ``commkern.spans.SPAN``; ``dtype`` a string such as
``"float32"``; ``rounding`` is ``"nearest"`` or ``"stochastic"``; ``residual`` is None
or ``(version0, version1[, committed])``; ``parts`` a list of buffers.

All raise TypeError for unknown or missing fields, ValueError (both values in the text)
for sizes that do not fit, and BackendError where the compiled module cannot be used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from commkern import backend
from commkern.arrays import as_bytes
from commkern.spans import SPAN


def _buffer(value: Any) -> Any:
    return value if value is None or isinstance(value, tuple) else as_bytes(value)


def _spans(value: Any) -> Any:
    got = getattr(value, "dtype", type(value).__name__)
    if got != SPAN:
        raise TypeError(f"spans: expected an array of dtype {SPAN}, got {got}")
    return np.ascontiguousarray(value)


def _parts(value: Any) -> Any:
    return [_buffer(part) for part in value]


def _residual(value: Any) -> Any:
    return None if value is None else tuple(_buffer(part) for part in value)


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "bytes": _buffer,
    "mutable_bytes": _buffer,
    "spans": _spans,
    "parts": _parts,
    "residual": _residual,
}


@functools.cache
def _function(name: str) -> backend.Kernel:
    fields = backend.signatures()[name]
    convert = {f: _CONVERT[kind] for f, (kind, _) in fields.items() if kind in _CONVERT}
    call = backend.core().call

    def kernel(**args: Any) -> None:
        for field in convert.keys() & args.keys():
            args[field] = convert[field](args[field])
        call(name, args)

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__doc__ = f"Compiled kernel; fields: {', '.join(fields)}."
    kernel.__signature__ = _signature(fields)  # type: ignore[attr-defined]
    return kernel


def _signature(fields: dict[str, tuple[str, Any]]) -> inspect.Signature:
    parameters = [
        inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
        )
        for field, (_, default) in fields.items()
    ]
    return inspect.Signature(parameters, return_annotation=None)


def __getattr__(name: str) -> backend.Kernel:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in backend.signatures():
        raise AttributeError(
            f"module {__name__!r} has no kernel {name!r}; "
            f"there are: {', '.join(backend.signatures())}"
        )
    return _function(name)


def __dir__() -> list[str]:
    return sorted(backend.signatures())
