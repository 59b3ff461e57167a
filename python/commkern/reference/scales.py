"""Scales of blocks: from values, to stored bytes, and back.

csrc/core/format.h is the contract. A group is what shares a scale: a block, or the
whole span with scales "span".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from commkern.arrays import Bytes
from commkern.formats import LARGEST_FLOATS, SUM_TILE, Format
from commkern.reference.codes import encode_minifloat, minifloat_values
from commkern.reference.numerics import (
    FORMATS,
    Bits,
    Floats,
    from_compute,
    largest_magnitude,
    to_compute,
)

_LANES = 16
_HALF_WORDS = {"float16": (0x7BFF, 0x7E00), "bfloat16": (0x7F7F, 0x7FC0)}
_E8M0_BIAS, _E8M0_NAN = 127, 255
_E4M3_NAN = 0x7F


class Scales(NamedTuple):
    """Per group: s, negative where the block was halved, NaN where it is not finite;
    the offset where there are any. ``stored`` is how a body begins."""

    stored: Bytes
    scale: Floats
    offset: Floats | None

    def spread(self, group: Floats, length: int, fmt: Format) -> Floats:
        """A number of every group, repeated for each of its elements."""
        size = length if fmt.scales == "span" else fmt.block_size
        return np.repeat(group, size)[:length]


def scales_of(values: Floats, fmt: Format) -> Scales:
    """The scales of one span's values (fp32 or fp64), at least one of them."""
    groups = _Groups(values, fmt)
    head = _head(groups)
    if fmt.statistic == "range":
        stored, offsets = _range_scales(groups, head)
    else:
        stored, offsets = _plain_scales(groups, head), None
    stored = np.where(groups.finite, stored, _nan_word(fmt, values.dtype))
    return _assembled(stored, offsets, head, fmt, values.dtype)


def read_scales(body: Bytes, length: int, fmt: Format, dtype: str) -> Scales:
    """The scales at the start of a body of ``length`` elements."""
    compute = FORMATS[dtype].compute
    sizes = (
        fmt.head_nbytes(dtype),
        fmt.scales_nbytes(length, dtype),
        fmt.offsets_nbytes(length, dtype),
    )
    end = sum(sizes)
    head, scales, offsets = (
        body[stop - size : stop].copy()
        for size, stop in zip(sizes, np.cumsum(sizes), strict=True)
    )
    first = head.view(compute)[0] if head.size else compute.type(1)
    words = head if fmt.scales == "span" else scales
    scale = _value(words.view(_word(fmt, compute)), first, fmt, compute)
    offset = None
    if fmt.has_offsets:
        offset = _value(offsets.view(_word(fmt, compute)), first, fmt, compute)
    return Scales(body[:end], scale, offset)


def _assembled(
    stored: Bits, offsets: Bits | None, head: Any, fmt: Format, compute: Any
) -> Scales:
    word = _word(fmt, compute)
    pieces = []
    if fmt.has_head and fmt.scales != "span":
        pieces.append(np.array([head], dtype=compute).view(np.uint8))
    pieces.append(stored.astype(word).view(np.uint8))
    scale = _value(stored.astype(word), head, fmt, compute)
    offset = None
    if offsets is not None:
        pieces.append(offsets.astype(word).view(np.uint8))
        offset = _value(offsets.astype(word), head, fmt, compute)
    return Scales(np.concatenate(pieces), scale, offset)


# --- values -> statistics -------------------------------------------------------------


class _Groups:
    """One span's values as rows of groups, zeros in the place of spoilt ones."""

    def __init__(self, values: Floats, fmt: Format) -> None:
        self.fmt = fmt
        self.compute = values.dtype
        self.number = values.dtype.type
        self.size = values.size if fmt.scales == "span" else fmt.block_size
        count = -(-values.size // self.size)
        padded = np.zeros(count * self.size, dtype=values.dtype)
        padded[: values.size] = values
        rows = padded.reshape(count, self.size)
        self.finite: Bits = np.isfinite(largest_magnitude(rows, axis=1))
        self.rows: Floats = np.where(self.finite[:, None], rows, self.number(0))
        self.absmax = largest_magnitude(self.rows, axis=1)
        self.largest_absmax = self.number(np.max(self.absmax, initial=0))
        #: Values of each group.
        self.counts = np.full(count, self.size)
        self.counts[-1] = values.size - (count - 1) * self.size

    @property
    def top(self) -> Any:
        """L in the compute type."""
        return self.number(self.fmt.largest)

    def wanted(self) -> Floats:
        """The scale before it is stored; may overflow."""
        statistic = self.fmt.statistic
        normal = _normaliser(self.absmax)
        scaled = np.abs(self.rows) * normal[:, None]
        wanted: Floats
        if statistic == "constant":
            wanted = (self.absmax > 0) * self.number(self.fmt.constant)
        elif statistic == "absmax":
            wanted = self.absmax / self.top
        elif statistic == "mean":
            wanted = ordered_sum(scaled) / self.counts.astype(self.compute) / normal
        else:
            wanted = np.sqrt(ordered_sum(scaled * scaled)) / self.top / normal
        return wanted

    def extremes(self) -> tuple[Floats, Floats]:
        """The smallest and largest value of every group."""
        rows = self.rows.copy()
        rows[-1, self.counts[-1] :] = rows[-1, 0]
        return rows.min(axis=1), rows.max(axis=1)


def _normaliser(absmax: Floats) -> Floats:
    """1 where no sum or square can leave the range, else the power of two, a normal
    number, that brings ``absmax`` to [1, 2)."""
    most = 1022 if absmax.dtype.itemsize == 8 else 126
    exponent = np.frexp(absmax)[1] - 1
    needed = (absmax == 0) | (exponent < -60) | (exponent >= 40)
    shift = np.where(needed, np.clip(-exponent, -most, most), 0)
    power: Floats = np.ldexp(absmax.dtype.type(1), shift)
    return power


def ordered_sum(rows: Floats) -> Floats:
    """Row sums of numbers >= 0 in the order that every implementation keeps.

    Tiles of 4096; in a tile 16 lane-strided partial sums, combined pairwise; tiles as a
    binary tree in index order. Zeros behind the last number change nothing.
    """
    count, size = rows.shape
    tiles = max(-(-size // SUM_TILE), 1)
    width = SUM_TILE if tiles > 1 else max(-(-size // _LANES), 1) * _LANES
    padded = np.zeros((count, tiles * width), dtype=rows.dtype)
    padded[:, :size] = rows
    steps = padded.reshape(count, tiles, -1, _LANES)
    lanes = steps[:, :, 0]
    for step in range(1, steps.shape[2]):
        lanes = lanes + steps[:, :, step]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return _tree_sum([lanes[:, tile, 0] for tile in range(tiles)])


def _tree_sum(parts: list[Floats]) -> Floats:
    """Equal-sized subtrees merge as soon as both exist; the rest from the right."""
    waiting: list[tuple[int, Floats]] = []
    for part in parts:
        size, total = 1, part
        while waiting and waiting[-1][0] == size:
            total = waiting.pop()[1] + total
            size *= 2
        waiting.append((size, total))
    total = waiting.pop()[1]
    while waiting:
        total = waiting.pop()[1] + total
    return total


# --- heads ----------------------------------------------------------------------------


def _head(groups: _Groups) -> Any:
    """The number of the compute type that a span begins with; 1 where there is none."""
    number, most = groups.number, groups.largest_absmax
    if groups.fmt.scales == "e4m3":
        return _e4m3_head(groups)
    if groups.fmt.scales != "float16" or most == 0:
        return number(1)
    with_l2 = most * number(np.sqrt(number(groups.fmt.block_size)))
    largest = {
        "absmax": most / groups.top,
        "l2": with_l2 / groups.top,
        "mean": most,
        "range": most,
    }[groups.fmt.statistic]
    if largest == 0:
        return number(1)
    least, top = (-1022, 1008) if number == np.float64 else (-126, 112)
    largest = min(largest, np.finfo(groups.compute).max)
    exponent = int(np.frexp(largest)[1]) - 1
    return np.ldexp(number(1), min(max(exponent - 14, least), top))


def _e4m3_head(groups: _Groups) -> Any:
    number, most = groups.number, groups.largest_absmax
    top = LARGEST_FLOATS["float8_e4m3"]
    head = most / number(top * groups.fmt.largest)
    if most > 0:
        head = max(head, np.finfo(groups.compute).smallest_subnormal)
    if np.isinf(groups.top * (number(top) * head)):
        head = np.nextafter(head, number(0))
    return number(head)


# --- statistics -> stored words -------------------------------------------------------


def _plain_scales(groups: _Groups, head: Any) -> Bits:
    """The stored scale of every group, for all statistics but "range"."""
    fmt = groups.fmt
    if fmt.scales == "ocp":
        return _ocp_words(groups)
    wanted = groups.wanted()
    if fmt.scales == "e4m3":
        # The head is 0 only where all groups are.
        return encode_minifloat(np.where(head > 0, wanted / head, 0), "float8_e4m3")
    words = _at_least(wanted, head, fmt)
    overflows = np.isinf(groups.top * _value(words, head, fmt, groups.compute))
    limit = np.full(1, _largest_scale(groups.top), groups.compute)
    limited: Bits = np.where(overflows, _at_most(limit, head, fmt), words)
    return limited


def _range_scales(groups: _Groups, head: Any) -> tuple[Bits, Bits]:
    """Stored scales and offsets; blocks whose range overflows are halved."""
    fmt, number = groups.fmt, groups.number
    least, most = groups.extremes()
    first = _value(_at_most(least, head, fmt), head, fmt, groups.compute)
    halved = np.isinf(most - first)
    half = np.where(halved, number(0.5), number(1))
    least, most = least * half, most * half
    offsets = _at_most(least, head, fmt)
    offset = _value(offsets, head, fmt, groups.compute)
    # Rounded down to -2^127, it would decode to twice that.
    offsets = offsets - np.isinf(offset / half).astype(offsets.dtype)
    offset = _value(offsets, head, fmt, groups.compute)
    # Below 0 where the offset had to be the largest number; never -0.
    distance = np.clip(most - offset, 0, np.finfo(groups.compute).max) + number(0)
    words = _at_least(distance / groups.top, head, fmt)
    reached = groups.top * _value(words, head, fmt, groups.compute) + offset
    words = words - np.isinf(reached / half).astype(words.dtype)
    sign = words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    words = np.where(halved, words | sign, words)
    return words, np.where(groups.finite, offsets, 0)


def _largest_scale(top: Any) -> Any:
    """The largest number that does not overflow when multiplied by ``top``."""
    number = type(top)
    scale = np.finfo(number).max / top
    return np.nextafter(scale, number(0)) if np.isinf(scale * top) else scale


def _ocp_words(groups: _Groups) -> Bits:
    exponent = np.frexp(groups.absmax)[1].astype(np.int64) - 1
    exponent = exponent - groups.fmt.largest_exponent
    words = np.clip(exponent, -_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
    return np.where(groups.absmax > 0, words, 0).astype(np.uint8)


def _word(fmt: Format, compute: np.dtype[Any]) -> Any:
    """The unsigned type of a stored scale."""
    if fmt.scales in _HALF_WORDS:
        return np.uint16
    if fmt.scales in ("e8m0", "ocp", "e4m3"):
        return np.uint8
    return np.uint64 if compute.itemsize == 8 else np.uint32


def _nan_word(fmt: Format, compute: np.dtype[Any]) -> Any:
    if fmt.scales in _HALF_WORDS:
        return np.uint16(_HALF_WORDS[fmt.scales][1])
    if fmt.scales in ("e8m0", "ocp"):
        return np.uint8(_E8M0_NAN)
    if fmt.scales == "e4m3":
        return np.uint8(_E4M3_NAN)
    return np.array(np.nan, dtype=compute).view(_word(fmt, compute))[()]


def _at_least(wanted: Floats, head: Any, fmt: Format) -> Bits:
    """The smallest stored word that is not below ``wanted`` >= 0; none is infinite."""
    finite = np.minimum(wanted, np.finfo(wanted.dtype).max)
    if fmt.scales in _HALF_WORDS:
        return _half_word(wanted / head, fmt.scales, up=True)
    if fmt.scales == "e8m0":
        fraction, exponent = np.frexp(finite)
        return _e8m0_word(exponent - (fraction == 0.5), finite)
    words: Bits = finite.view(_word(fmt, wanted.dtype))
    return words


def _at_most(values: Floats, head: Any, fmt: Format) -> Bits:
    """The largest stored word that is not above a value; a zero has no sign."""
    if fmt.scales in _HALF_WORDS:
        return _half_word(values / head, fmt.scales, up=False)
    if fmt.scales == "e8m0":
        return _e8m0_word(np.frexp(values)[1] - 1, values)
    words: Bits = (values + values.dtype.type(0)).view(_word(fmt, values.dtype))
    return words


def _e8m0_word(exponent: Any, values: Floats) -> Bits:
    words = np.clip(exponent, -_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
    return np.where(values > 0, words, 0).astype(np.uint8)


def _half_word(values: Floats, name: str, *, up: bool) -> Bits:
    """fp16 or bf16, rounded up or down; past the largest number: that."""
    largest, _ = _HALF_WORDS[name]
    wire, unit = FORMATS[name], np.uint16(1)
    nearest = from_compute(values, wire)
    magnitude, sign = nearest & np.uint16(0x7FFF), nearest & np.uint16(0x8000)
    rounded = to_compute(nearest, wire, values.dtype)
    if up:
        moved = magnitude + unit * (rounded < values)  # of values >= 0
    else:
        above = rounded > values
        sign = np.where(above & (magnitude == 0), np.uint16(0x8000), sign)
        moved = np.where(sign > 0, magnitude + unit * above, magnitude - unit * above)
    moved = np.minimum(moved, np.uint16(largest))
    words: Bits = np.where(moved == 0, np.uint16(0), sign | moved)
    return words.astype(np.uint16)


def _value(words: Bits, head: Any, fmt: Format, compute: np.dtype[Any]) -> Floats:
    """What stored scales or offsets stand for."""
    value: Floats
    if fmt.scales in _HALF_WORDS:
        value = to_compute(words, FORMATS[fmt.scales], compute)
    elif fmt.scales in ("e8m0", "ocp"):
        value = _e8m0_values(compute)[words]
    elif fmt.scales == "e4m3":
        value = minifloat_values("float8_e4m3", compute)[words]
    else:
        value = words.view(compute)
    return value * compute.type(head) if fmt.scales in ("float16", "e4m3") else value


@functools.cache
def _e8m0_values(compute: np.dtype[Any]) -> Floats:
    """By stored byte: powers of two, and a NaN."""
    values: Floats = np.ldexp(compute.type(1), np.arange(256) - _E8M0_BIAS)
    values[_E8M0_NAN] = np.nan
    return values
