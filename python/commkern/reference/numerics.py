"""Number formats and floating-point rules that the kernels share.

Everything here rounds as IEEE 754 says, whatever the caller did to the CPU's flags:
``exact_arithmetic`` sets the default environment around each kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Bits = npt.NDArray[Any]


class Format(NamedTuple):
    """A storage format: ``storage`` holds one element, ``compute`` does arithmetic."""

    name: str
    code: int
    storage: np.dtype[Any]
    compute: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.storage.itemsize


_F32, _F64, _U16 = np.dtype("<f4"), np.dtype("<f8"), np.dtype("<u2")
FORMATS = {
    "float32": Format("float32", 0, _F32, _F32),
    "float64": Format("float64", 1, _F64, _F64),
    "float16": Format("float16", 2, _U16, _F32),
    "bfloat16": Format("bfloat16", 3, _U16, _F32),
}


def to_compute(stored: Bits, fmt: Format, compute: np.dtype[Any]) -> Floats:
    """Decode elements of ``fmt`` as ``compute`` (fp32 or fp64), rounding once."""
    if fmt.name == "float16":
        wide: Floats = stored.view(np.float16).astype(compute)
    elif fmt.name == "bfloat16":
        wide = (stored.astype(np.uint32) << np.uint32(16)).view(_F32)
    else:
        wide = stored
    return wide.astype(compute)


def from_compute(values: Floats, fmt: Format) -> Bits:
    """Encode fp32 or fp64 values: to nearest, ties to even, overflow to Inf.

    A NaN that changes its width becomes the canonical quiet NaN with its sign kept
    (fp16 0x7e00, bf16 0x7fc0).
    """
    if fmt.name == "bfloat16":
        return _to_bfloat16(values)
    if fmt.name == "float16":
        half = values.astype(np.float16).view(np.uint16)
        return _canonical_nan(half, values, 0x7E00)
    return values.astype(fmt.storage)


def _to_bfloat16(values: Floats) -> Bits:
    bits = round_to_odd(values).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return _canonical_nan(rounded.astype(np.uint16), values, 0x7FC0)


def _canonical_nan(narrow: Bits, values: Floats, nan: int) -> Bits:
    sign = np.signbit(values).astype(np.uint16) << np.uint16(15)
    canonical: Bits = np.where(np.isnan(values), sign | np.uint16(nan), narrow)
    return canonical.astype(np.uint16)


def round_to_odd(values: Floats) -> Floats:
    """fp64 to fp32 so that a second rounding (to 22 bits or fewer) is exact.

    Truncates, then sets the last bit where something was cut off (S. Boldo and
    G. Melquiond, "When double rounding is odd", 2005). fp32 passes through.
    """
    if values.dtype == _F32:
        return values
    nearest = values.astype(_F32)
    wide = nearest.astype(_F64)
    bits = nearest.view(np.uint32).copy()
    bits -= (np.abs(wide) > np.abs(values)).astype(np.uint32)
    bits |= (wide != values).astype(np.uint32)
    odd: Floats = bits.view(_F32)
    return odd


def magnitude_bits(values: Floats) -> Bits:
    """The bits with the sign cleared: ordered like |x|, with NaN above Inf."""
    if values.dtype == _F64:
        wide: Bits = values.view(np.uint64) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
        return wide
    narrow: Bits = values.view(np.uint32) & np.uint32(0x7FFF_FFFF)
    return narrow


def largest_magnitude(values: Floats, axis: int | None = None) -> Floats:
    """max |x| along ``axis`` by integer comparison; a NaN gives a NaN, nothing 0."""
    bits: Bits = np.asarray(np.max(magnitude_bits(values), axis=axis, initial=0))
    return bits.view(values.dtype)


def lift_and_reciprocal(scale: Floats) -> tuple[Floats, Floats]:
    """(lift, 1 / (scale * lift)): lift is 2^100 where scale < 2^-100, else 1.

    Without it the reciprocal of a denormal overflows. Scales of 0 give (2^100, Inf).
    """
    number = scale.dtype.type
    lift = np.where(scale < number(2.0**-100), number(2.0**100), number(1))
    return lift, number(1) / (scale * lift)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Run NumPy with the default floating-point environment and no warnings.

    ``torch.set_flush_denormal(True)`` or ``-ffast-math`` libraries set CPU flags that
    NumPy's loops inherit; C's ``fesetenv`` puts them aside for this thread. Where the
    C library has no such call, denormals are kept only if the caller keeps them.
    """
    environment = _floating_environment()
    saved = environment.hold() if environment else None
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        if environment:
            environment.restore(saved)


class _FloatingEnvironment:
    _DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._get, self._set = library.fegetenv, library.fesetenv

    def hold(self) -> Any:
        saved = ctypes.create_string_buffer(64)  # fenv_t is 32 bytes or fewer
        self._get(saved)
        self._set(self._DEFAULT)
        return saved

    def restore(self, saved: Any) -> None:
        self._set(saved)


@functools.cache
def _floating_environment() -> _FloatingEnvironment | None:
    import platform

    if platform.system() != "Linux":
        return None
    try:
        return _FloatingEnvironment()
    except (AttributeError, OSError):
        return None
