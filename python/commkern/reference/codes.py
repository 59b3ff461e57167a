"""Values to codes and back, code by code; csrc/core/format.h is the contract.

Values are in units of their scale. Codes are integers, stored in the low bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commkern.arrays import Bytes
from commkern.formats import LARGEST_FLOATS, Format, ternary_nbytes
from commkern.reference.bitpack import pack, packed_nbytes, unpack
from commkern.reference.code_books import BOOKS
from commkern.reference.numerics import Bits, Floats

Codes = npt.NDArray[np.int64]

_TERNARY_WEIGHTS = (1, 3, 9, 27, 81)
_DIGIT_VALUES = np.array([0, 1, -1, 0])


class Input(NamedTuple):
    """What is coded, one entry an element: values and their position p = value / s.

    ``draw`` holds the element's random byte, None with nearest rounding.
    """

    values: Floats
    position: Floats
    scale: Floats
    draw: Bits | None

    @property
    def noise(self) -> Floats:
        """u = (byte + 0.5) / 256."""
        number = self.position.dtype.type
        u: Floats = (self._bytes.astype(number) + number(0.5)) / number(256)
        return u

    @property
    def _bytes(self) -> Bits:
        assert self.draw is not None
        return self.draw

    def rounded(self) -> Floats:
        if self.draw is None:
            nearest: Floats = np.rint(self.position)
            return nearest
        down: Floats = np.floor(self.position + self.noise)
        return down


def encode(item: Input, fmt: Format) -> Codes:
    """The code of every element."""
    if fmt.code in _MINIFLOATS:
        return encode_minifloat(item.position, fmt.code)
    if fmt.code in BOOKS:
        return BOOKS[fmt.code].encode(item.position)
    codes: Codes = _ENCODERS[fmt.code](item, fmt).astype(np.int64)
    return codes


def decode(codes: Codes, fmt: Format, compute: np.dtype[Any]) -> Floats:
    """The value of every code, in units of the scale; any bits have one."""
    stored = codes & ((1 << fmt.bits) - 1)
    table = _table(fmt, compute)
    if table is not None:
        looked_up: Floats = table[stored]
        return looked_up
    if fmt.code == "sign":
        codes = 1 - 2 * stored
    if fmt.code == "asymmetric":
        codes = stored
    values: Floats = codes.astype(compute)
    return values


def _table(fmt: Format, compute: np.dtype[Any]) -> Floats | None:
    """Values by stored code, for codes that are looked up."""
    if fmt.code in _MINIFLOATS:
        return minifloat_values(fmt.code, compute)
    if fmt.code in BOOKS:
        return BOOKS[fmt.code].values(compute)
    return _natural_values(fmt.bits, compute) if fmt.code == "natural" else None


def _symmetric(item: Input, fmt: Format) -> Floats:
    return _clamped(item.rounded(), -fmt.largest, fmt.largest)


def _asymmetric(item: Input, fmt: Format) -> Floats:
    return _clamped(item.rounded(), 0.0, fmt.largest)


def _clamped(values: Floats, least: float, most: float) -> Floats:
    number = values.dtype.type
    clamped: Floats = np.minimum(np.maximum(values, number(least)), number(most))
    return clamped


def _sign(item: Input, fmt: Format) -> Bits:
    if item.draw is None:
        negative: Bits = item.values < 0
        return negative
    number = item.position.dtype.type
    drawn: Bits = item.position + (number(2) * item.noise - number(1)) < 0
    return drawn


def _threshold(item: Input, fmt: Format) -> Bits:
    above = (item.values >= item.scale).astype(np.int64)
    codes: Bits = above - (item.values <= -item.scale)
    return codes


def _natural(item: Input, fmt: Format) -> Bits:
    """To one of the two powers of two around |p|, by a carry into the exponent."""
    number = item.position.dtype.type
    top = 2 ** (fmt.bits - 1) - 1
    y = np.minimum(np.abs(item.position), number(1))
    unsigned, mantissa, bias = (
        (np.uint64, 52, 1023) if y.dtype.itemsize == 8 else (np.uint32, 23, 127)
    )
    draw = item._bytes.astype(unsigned)
    half_unit = unsigned(1 << (mantissa - 9))
    raised = y.view(unsigned) + (draw << unsigned(mantissa - 8) | half_unit)
    level = (raised >> unsigned(mantissa)).astype(np.int64) - bias + top
    least = y * number(2.0 ** (top - 1)) + item.noise >= number(1)
    level = np.where(y >= number(2.0 ** (1 - top)), level, least)
    negative = (item.position < 0) & (level > 0)
    codes: Bits = level | negative.astype(np.int64) << (fmt.bits - 1)
    return codes


def _natural_values(bits: int, compute: np.dtype[Any]) -> Floats:
    top = 2 ** (bits - 1) - 1
    levels = np.ldexp(compute.type(1), np.arange(top + 1) - top)
    levels[0] = 0
    signed: Floats = np.concatenate([levels, -levels])
    signed[top + 1] = 0  # no -0
    return signed.astype(compute)


_ENCODERS = {
    "symmetric": _symmetric,
    "asymmetric": _asymmetric,
    "sign": _sign,
    "ternary": _symmetric,
    "threshold": _threshold,
    "natural": _natural,
}


# --- floats of the OCP specifications -------------------------------------------------


class Minifloat(NamedTuple):
    """A float of 4, 6 or 8 bits with a sign; denormals as in IEEE 754."""

    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """Of normal numbers; one minus the bias."""
        return 2 - (1 << (self.exponent_bits - 1))


_MINIFLOATS = {
    name: Minifloat(int(name[-3]), int(name[-1]), largest)  # as in "float8_e4m3"
    for name, largest in LARGEST_FLOATS.items()
}


def encode_minifloat(values: Floats, name: str) -> Codes:
    """To nearest, ties to even, saturating; a zero has no sign. No NaN."""
    fmt, number = _MINIFLOATS[name], values.dtype.type
    magnitude = np.minimum(np.abs(values), number(fmt.largest))
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1
    exponent = np.where(magnitude > 0, exponent, fmt.least_exponent)
    steps_up = np.maximum(exponent, fmt.least_exponent) - fmt.least_exponent
    shift = fmt.mantissa_bits - fmt.least_exponent - steps_up
    units = np.rint(np.ldexp(magnitude, shift)).astype(np.int64)
    codes = units + (steps_up << fmt.mantissa_bits)
    negative = (values < 0) & (codes > 0)
    signed: Codes = codes | negative.astype(np.int64) << (fmt.bits - 1)
    return signed


@functools.cache
def minifloat_values(name: str, compute: np.dtype[Any]) -> Floats:
    """The value of every bit pattern; those of NaN and Inf in e4m3 and e5m2, too."""
    fmt = _MINIFLOATS[name]
    patterns = np.arange(1 << (fmt.bits - 1))
    exponent, fraction = divmod(patterns, 1 << fmt.mantissa_bits)
    units = np.where(exponent > 0, fraction + (1 << fmt.mantissa_bits), fraction)
    power = np.maximum(exponent, 1) - 1 + fmt.least_exponent - fmt.mantissa_bits
    values = np.ldexp(units.astype(compute), power)
    values[values > fmt.largest] = np.nan
    if name == "float8_e5m2":
        values[0x7C] = np.inf
    signed: Floats = np.concatenate([values, -values])
    return signed


# --- packing --------------------------------------------------------------------------


def pack_codes(codes: Codes, fmt: Format) -> Bytes:
    """Codes of one span as they are stored."""
    if fmt.code != "ternary":
        return pack(codes, fmt.bits)
    whole = codes.size // fmt.block_size * fmt.block_size
    blocks = codes[:whole].reshape(-1, fmt.block_size)
    rest = codes[whole:].reshape(1, -1)
    return np.concatenate([_pack_ternary(blocks), _pack_ternary(rest)])


def unpack_codes(packed: Bytes, length: int, fmt: Format) -> Codes:
    """The codes of ``length`` elements, sign-extended."""
    if fmt.code != "ternary":
        return unpack(packed[: packed_nbytes(length, fmt.bits)], length, fmt.bits)
    count, rest = divmod(length, fmt.block_size)
    width = ternary_nbytes(fmt.block_size)
    last = packed[count * width : count * width + ternary_nbytes(rest)]
    blocks = packed[: count * width].reshape(count, width)
    return np.concatenate(
        [
            _unpack_ternary(blocks, fmt.block_size),
            _unpack_ternary(last.reshape(1, -1), rest),
        ]
    )


def _pack_ternary(blocks: Codes) -> Bytes:
    """Shape (blocks, count): five digits a byte, a width apart."""
    count, width = blocks.shape[1], ternary_nbytes(blocks.shape[1])
    digits = np.zeros((blocks.shape[0], 5 * width), dtype=np.int64)
    digits[:, :count] = np.where(blocks < 0, 2, blocks)
    columns = digits.reshape(blocks.shape[0], 5, width)
    packed = np.zeros((blocks.shape[0], width), dtype=np.int64)
    for place, weight in enumerate(_TERNARY_WEIGHTS):
        packed += weight * columns[:, place]
    return packed.reshape(-1).astype(np.uint8)


def _unpack_ternary(packed: Bytes, count: int) -> Codes:
    """A bad byte (above 242) has digits up to 3 in its last place, which count as 0."""
    columns = [
        packed.astype(np.int64) // weight % (3 if weight < 81 else 4)
        for weight in _TERNARY_WEIGHTS
    ]
    digits = np.concatenate(columns, axis=1)[:, :count]
    values: Codes = _DIGIT_VALUES[digits]
    return values.reshape(-1)
