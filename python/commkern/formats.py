"""The formats of the block quantisers; twin of ``struct Format`` in csrc.

A format says what an element, a scale and the body of a span look like. The fields are
the keyword arguments of the kernels quantize, dequantize, dequantize_add and
requantize_sum.
"""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from commkern.wire.dtypes import compute_nbytes

ROUNDINGS: Final = ("nearest", "stochastic")
BLOCK_SIZES: Final = (16, 8192)
ROTATIONS: Final = tuple(1 << k for k in range(5, 13))
MOST_CONSTANT: Final = 1e38
SUM_TILE: Final = 4096
"""Values that are summed together before tiles are combined."""

_PLAIN = ("compute", "float16", "bfloat16", "span")
_POWER = (*_PLAIN, "e8m0")
_FLOAT = (*_POWER, "ocp")
_SPAN = ("span",)
_SCALE_NBYTES = {"float16": 2, "bfloat16": 2, "e8m0": 1, "ocp": 1, "e4m3": 1}
_VALUES_PER_TERNARY_BYTE = 5


class Code(NamedTuple):
    """What a code goes with: ranges of bits, scales, statistics and roundings."""

    bits: tuple[int, int]
    scales: tuple[str, ...]
    statistics: tuple[str, ...]
    roundings: tuple[str, ...]


def _floats(bits: int, scales: tuple[str, ...] = _FLOAT) -> Code:
    return Code((bits, bits), scales, ("absmax",), ("nearest",))


CODES: Final = {
    "symmetric": Code((2, 8), _POWER, ("absmax", "l2"), ROUNDINGS),
    "asymmetric": Code((1, 8), _PLAIN, ("range",), ROUNDINGS),
    "sign": Code((1, 1), _PLAIN, ("absmax", "mean", "constant"), ROUNDINGS),
    "ternary": Code((2, 2), _POWER, ("absmax",), ("stochastic",)),
    "threshold": Code((2, 2), _SPAN, ("constant",), ("nearest",)),
    "natural": Code((2, 8), ("e8m0",), ("absmax",), ("stochastic",)),
    "float8_e4m3": _floats(8),
    "float8_e5m2": _floats(8),
    "float6_e3m2": _floats(6),
    "float6_e2m3": _floats(6),
    "float4_e2m1": _floats(4, (*_FLOAT, "e4m3")),
    "nf4": _floats(4, _POWER),
    "dynamic8": _floats(8, _POWER),
}
LARGEST_FLOATS: Final = {
    "float8_e4m3": 448.0,
    "float8_e5m2": 57344.0,
    "float6_e3m2": 28.0,
    "float6_e2m3": 7.5,
    "float4_e2m1": 6.0,
}


@dataclass(frozen=True)
class Format:
    """How a block quantiser stores elements and scales.

    Parameters
    ----------
    code : a name of `CODES`
    bits : stored bits of an element; ternary codes are packed five to a byte
    block_size : multiple of 8 from 16 to 8192
    scales : "compute", "float16", "bfloat16", "e8m0", "ocp", "e4m3" or "span"
    statistic : "absmax", "l2", "mean", "range" or "constant"
    constant : the scale, for the statistic of that name only
    rotation : 0, or the elements of a Hadamard transform before the code
    """

    code: str = "symmetric"
    bits: int = 8
    block_size: int = 128
    scales: str = "compute"
    statistic: str = "absmax"
    constant: float = 1.0
    rotation: int = 0

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of the kernels."""
        return asdict(self)

    # --- what follows from the fields ---------------------------------------------

    @property
    def largest(self) -> float:
        """Magnitude of the largest value of a code, in units of the scale."""
        if self.code == "symmetric":
            return float(2 ** (self.bits - 1) - 1)
        if self.code == "asymmetric":
            return float(2**self.bits - 1)
        return LARGEST_FLOATS.get(self.code, 1.0)

    @property
    def largest_exponent(self) -> int:
        """floor(log2(largest))."""
        return math.frexp(self.largest)[1] - 1

    @property
    def has_head(self) -> bool:
        """Whether a span begins with a number of the compute type."""
        return self.scales in ("float16", "e4m3", "span")

    @property
    def has_offsets(self) -> bool:
        return self.code == "asymmetric"

    @property
    def unit(self) -> int:
        """Elements that are worked on together; spans begin at its multiples."""
        return max(self.block_size, self.rotation)

    # --- sizes --------------------------------------------------------------------

    def blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def scale_nbytes(self, dtype: str) -> int:
        """Bytes of a stored scale or offset."""
        return _SCALE_NBYTES.get(self.scales) or compute_nbytes(dtype)

    def head_nbytes(self, dtype: str) -> int:
        return compute_nbytes(dtype) if self.has_head else 0

    def scales_nbytes(self, length: int, dtype: str) -> int:
        """Bytes of all stored scales; the one of a span is its head."""
        stored = 0 if self.scales == "span" else self.blocks(length)
        return stored * self.scale_nbytes(dtype)

    def offsets_nbytes(self, length: int, dtype: str) -> int:
        if not self.has_offsets:
            return 0
        stored = 1 if self.scales == "span" else self.blocks(length)
        return stored * self.scale_nbytes(dtype)

    def codes_nbytes(self, length: int) -> int:
        if self.code != "ternary":
            return -(-length * self.bits // 8)
        whole, rest = divmod(length, self.block_size)
        return whole * ternary_nbytes(self.block_size) + ternary_nbytes(rest)

    def body_nbytes(self, length: int, dtype: str) -> int:
        """Exact bytes of the coded form of a span of ``length`` elements."""
        if length == 0:
            return 0
        return (
            self.head_nbytes(dtype)
            + self.scales_nbytes(length, dtype)
            + self.offsets_nbytes(length, dtype)
            + self.codes_nbytes(length)
        )

    def alignment(self, dtype: str) -> int:
        """Bytes that a body is aligned to inside a section."""
        return self.head_nbytes(dtype) or self.scale_nbytes(dtype)

    def bits_per_element(self, dtype: str) -> float:
        """Stored bits of an element of a long span, scales included."""
        length = self.block_size
        stored = self.scales_nbytes(length, dtype) + self.codes_nbytes(length)
        if self.has_offsets and self.scales != "span":
            stored += self.offsets_nbytes(length, dtype)
        return 8 * stored / length

    # --- checks -------------------------------------------------------------------

    def check(self, rounding: str | None = None) -> None:
        """Raise ValueError, naming what is allowed, for what makes no format.

        ``rounding`` is how codes are made; None where they are only decoded.
        """
        _one_of("code", self.code, CODES)
        code = CODES[self.code]
        least, most = code.bits
        for field in ("bits", "block_size", "rotation"):
            _integer(field, getattr(self, field))
        if not least <= self.bits <= most:
            allowed = f"{least}" if least == most else f"{least} ... {most}"
            raise ValueError(
                f"bits of code {self.code} must be {allowed}, got {self.bits}"
            )
        check_block_size(self.block_size)
        _one_of(f"scales of code {self.code}", self.scales, code.scales)
        _one_of(f"statistic of code {self.code}", self.statistic, code.statistics)
        if self.scales == "span" and SUM_TILE % self.block_size:
            raise ValueError(
                f"block_size with scales span must divide {SUM_TILE}, "
                f"got {self.block_size}"
            )
        if rounding is not None:
            _one_of("rounding", rounding, ROUNDINGS)
            _one_of(f"rounding of code {self.code}", rounding, code.roundings)
            if self.code == "sign":
                self._check_sign(rounding)
        if self.code == "sign" and self.statistic == "constant":
            _one_of("scales of code sign with statistic constant", self.scales, _SPAN)
        if self.statistic == "constant" and not 0 < self.constant < MOST_CONSTANT:
            raise ValueError(
                f"constant must be a number in (0, {MOST_CONSTANT:g}), "
                f"got {self.constant}"
            )
        if self.rotation:
            self._check_rotation()

    def _check_sign(self, rounding: str) -> None:
        wanted = "stochastic" if self.statistic == "absmax" else "nearest"
        if rounding != wanted:
            raise ValueError(
                f"rounding of code sign with statistic {self.statistic} must be "
                f"{wanted}, got {rounding}"
            )

    def _check_rotation(self) -> None:
        if self.rotation not in ROTATIONS:
            raise ValueError(
                f"rotation must be 0 or a power of two in {ROTATIONS[0]}.."
                f"{ROTATIONS[-1]}, got {self.rotation}"
            )
        if self.unit % self.block_size or self.unit % self.rotation:
            raise ValueError(
                "rotation must be a multiple or a divisor of block_size "
                f"{self.block_size}, got {self.rotation}"
            )
        if self.statistic == "constant":
            raise ValueError(
                f"rotation with statistic constant must be 0, got {self.rotation}"
            )


def ternary_nbytes(count: int) -> int:
    """Bytes of the ternary codes of one block of ``count`` values."""
    return -(-count // _VALUES_PER_TERNARY_BYTE)


def check_block_size(block_size: int) -> None:
    least, most = BLOCK_SIZES
    if block_size % 8 or not least <= block_size <= most:
        raise ValueError(
            f"block_size must be a multiple of 8 in {least}..{most}, got {block_size}"
        )


def _integer(field: str, value: Any) -> None:
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{field} must be an int, got {value!r}") from None


def _one_of(field: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{field} must be a string, got {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
