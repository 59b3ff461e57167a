"""Bounds of the block quantisers, derived from their format.

n is the block size, L the largest value of a code, A the block's absmax, w the scale
before it is stored and s the stored one. Arithmetic is exact here: roundings of the
compute type are left to the caller's tolerance.
"""

from __future__ import annotations

import math

from commkern.formats import LARGEST_FLOATS, Format
from commkern.wire.dtypes import compute_nbytes

_MOST = {8: 1.7976931348623157e308, 4: 3.4028234663852886e38}
_POWER_MOST, _POWER_LEAST = 2.0**127, 2.0**-127
_HALF_LEAST = {8: 2.0 ** (-1022 - 24), 4: 2.0 ** (-126 - 24)}  # least head, least fp16
_MANTISSA_BITS = {name: int(name[-1]) for name in LARGEST_FLOATS}
# Half of the largest distance between two values: between -1 and -0.696; steps of
# 0.9 / 64, which the values' rounding to fp32 may stretch by 2^-24 at either end.
_BOOKS = {"nf4": (1 - 0.6961928009986877) / 2, "dynamic8": 0.9 / 128 + 2.0**-24}
#: By how much a scale may exceed what it is rounded up from, relatively.
_ROUNDED_UP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "e8m0": 1.0, "e4m3": 2.0**-4}
# 8 random bits: P(up) misses its fraction f by at most 1/512, so that a variance of
# f (1 - f) becomes f (1 - f) + (1 - 2 f) / 512 at most, whose maximum is this.
_QUARTER = 0.25 * (1 + 2.0**-16)
_DRAW = 1 / 512


def error(
    fmt: Format, rounding: str, absmax: float, largest: float, dtype: str
) -> float:
    """Largest |x - decoded| in a block with ``absmax``, ``largest`` being the span's.

    Either x lies between two values of the code, or beyond the largest of them.
    """
    if fmt.rotation:
        return _rotated_error(fmt, rounding, largest, dtype)
    block = largest if fmt.scales == "span" else absmax
    if fmt.statistic == "constant":
        return _constant_error(fmt, block)
    low, high = _scale_range(fmt, block, largest, dtype)
    beyond = max(block - fmt.largest * low, 0.0)
    if fmt.code == "asymmetric":
        beyond = max(2 * block - fmt.largest * low, 0.0)
    if fmt.code == "sign":
        beyond = 0.0
    return max(high * _largest_step(fmt, rounding, block, high), beyond)


def _largest_step(fmt: Format, rounding: str, absmax: float, scale: float) -> float:
    """Largest error of a value in range, in units of the scale."""
    if fmt.code in _MANTISSA_BITS:
        return math.ldexp(0.5, fmt.largest_exponent - _MANTISSA_BITS[fmt.code])
    if fmt.code in _BOOKS:
        return _BOOKS[fmt.code]
    if fmt.code == "natural":
        return 0.5 if fmt.bits > 2 else 1.0  # from 1/2 to 1, or from 0 to 1
    if fmt.code == "sign":
        relative = absmax / scale if scale > 0 else 0.0
        return relative + 1 if rounding == "stochastic" else max(relative, 1.0)
    return 1.0 if rounding == "stochastic" else 0.5


def _constant_error(fmt: Format, absmax: float) -> float:
    """Sign: |x -+ c|; threshold: |x| below c, |x| - c above."""
    return max(absmax, fmt.constant) if absmax > 0 else 0.0


def _rotated_error(fmt: Format, rounding: str, largest: float, dtype: str) -> float:
    """A rotation of R values stretches absmax by sqrt(R) at most; back, an error of e
    in each of them by as much."""
    plain = Format(**fmt.fields() | {"rotation": 0})
    stretch = math.sqrt(fmt.rotation)
    rotated = error(plain, rounding, stretch * largest, stretch * largest, dtype)
    return stretch * rotated


def _wanted(fmt: Format, absmax: float) -> float:
    """An upper bound of the scale before it is stored."""
    if fmt.statistic == "l2":
        return absmax * math.sqrt(fmt.block_size) / fmt.largest
    if fmt.statistic == "range":
        # From an offset that was rounded down to the largest value.
        return absmax * (2 + _ROUNDED_UP.get(fmt.scales, 0.0)) / fmt.largest
    return absmax / fmt.largest


def _scale_range(
    fmt: Format, absmax: float, largest: float, dtype: str
) -> tuple[float, float]:
    """Bounds of the stored scale: a lower one where x may lie beyond L s, an upper."""
    wanted, top, width = _wanted(fmt, absmax), fmt.largest, compute_nbytes(dtype)
    up = 1 + _ROUNDED_UP.get(fmt.scales, 0.0)
    high, low = wanted * up, wanted
    if fmt.statistic == "range":
        low = 2 * absmax / top
    if fmt.scales == "float16":
        # In units of 2^-24 head, the head being at most the largest scale / 2^14.
        high += _wanted(fmt, largest) * top ** (fmt.statistic == "range") * 2.0**-38
        high = max(high, _HALF_LEAST[width])
    if fmt.scales == "bfloat16":
        high, low = max(high, 2.0**-133), min(low, 2.0**128 * (1 - 2.0**-8))
    if fmt.scales == "e8m0":
        high, low = max(high, _POWER_LEAST), min(low, _POWER_MOST)
    if fmt.scales == "ocp":
        exponent = fmt.largest_exponent
        high = max(absmax * 2.0**-exponent, _POWER_LEAST)
        low = min(absmax * 2.0 ** -(exponent + 1), _POWER_MOST)
    if fmt.scales == "e4m3":
        # To nearest; denormal scales are in units of 2^-9 head.
        unit = largest / (LARGEST_FLOATS["float8_e4m3"] * top) * 2.0**-10
        high, low = high + unit, max(wanted * (1 - 2.0**-4) - unit, 0.0)
    if top * high > _MOST[width]:
        low /= up  # the largest scale that does not overflow: a step down
    return low, high


def variance(fmt: Format) -> float | None:
    """omega with E|C(x) - x|^2 <= omega |x|^2 for stochastic rounding.

    Per element at most s^2 / 4, and at most s |x|; A <= |x| and sum |x| <= sqrt(n) |x|.
    """
    if fmt.scales == "span":
        return None
    n, top = fmt.block_size, fmt.largest
    stretch = (1 + _ROUNDED_UP.get(fmt.scales, 0.0)) ** 2
    if fmt.code == "sign":
        # s^2 - x^2, and E C(x) misses x by at most s / 256.
        return n * (1 + 1 / 128) * stretch
    if fmt.code == "natural":
        return _natural_variance(fmt)
    if fmt.code == "asymmetric":
        # (max - min)^2 <= 2 |x|^2, and the offset is rounded down.
        distance = math.sqrt(2) + _ROUNDED_UP.get(fmt.scales, 0.0)
        return n * _QUARTER * distance**2 / top**2 * stretch
    return uniform_variance(n, (1 + _ROUNDED_UP.get(fmt.scales, 0.0)) / top)


def uniform_variance(n: int, step: float) -> float:
    """omega for stochastic rounding to multiples of at most ``step`` times absmax."""
    by_steps = n * _QUARTER * step**2
    by_sizes = math.sqrt(n) * step + n * _DRAW * step**2
    return min(by_steps, by_sizes)


def _natural_variance(fmt: Format) -> float:
    """Between powers of two f (1 - f) / (1 + f)^2 <= 1/8 of x^2; below the least one,
    l: at most (l s)^2 / 4 and l s |x|, with s <= 2 A."""
    least = math.ldexp(1.0, 2 - (1 << (fmt.bits - 1)))
    n = fmt.block_size
    by_steps = n * _QUARTER * (2 * least) ** 2
    by_sizes = math.sqrt(n) * 2 * least + n * _DRAW * (2 * least) ** 2
    return 1 / 8 + _DRAW + min(by_steps, by_sizes)


def contraction(fmt: Format, dtype: str) -> float | None:
    """delta with |C(x) - x|^2 <= (1 - delta) |x|^2 for rounding to nearest, or None.

    Where 0 is a value no element loses more than itself, and the largest, which is at
    least |x|^2 / n, loses the square of its relative error.
    """
    n = fmt.block_size
    if fmt.scales in ("span", "e4m3"):
        return None  # depends on the length; a small block's scale may be 0
    if fmt.code == "sign":
        # |x|^2 - 2 s sum|x| + n s^2, least at the mean, with sum|x| >= |x|.
        return (1 - _ROUNDED_UP.get(fmt.scales, 0.0) ** 2) / n
    if fmt.code == "asymmetric":
        relative = math.sqrt(2) + _ROUNDED_UP.get(fmt.scales, 0.0)
        scale = relative * (1 + _ROUNDED_UP.get(fmt.scales, 0.0)) / fmt.largest
        left = 1 - n * scale**2 / 4
        return left if left > 0 else None
    if fmt.statistic != "absmax":
        return None
    plain = Format(**fmt.fields() | {"rotation": 0})
    lost = error(plain, "nearest", 1.0, 1.0, dtype)
    if fmt.scales == "compute" and fmt.code != "dynamic8":
        lost = 0.0  # L s is A
    return (1 - lost**2) / n if lost < 1 else None
