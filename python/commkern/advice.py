"""Does compressing pay on a link, and with what? A model without measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commkern.compressors import Compressor, Identity
from commkern.compressors import compressor as read_compressor
from commkern.inputs import checked_int, checked_number
from commkern.layout import Member, effective
from commkern.wire.dtypes import NBYTES

CANDIDATES = ("identity", "quantize:bits=8", "quantize:bits=4")
#: Lower by less than this share is not worth a change.
MARGIN = 0.05
#: What `Tensor.copy_` copies in a second on one core, in bytes of fp32.
COPY_BYTES_PER_S = 8e9
#: Time over that of a copy of the same elements, on AVX-512 (docs/kernels.md): coding
#: with feedback, summing two parts with feedback, decoding. Plain elements are summed
#: where they lie (two are read, one is written).
COPIES = {
    "identity": (0.0, 1.5, 0.0),
    "quantize:bits=8": (1.24, 1.25, 0.62),
    "quantize:bits=4": (1.16, 1.47, 0.64),
}


@dataclass(frozen=True)
class Advice:
    """What to use, and why; ``str(advice)`` is a sentence.

    ``compressor`` is a string form, "identity" where compressing does not pay.
    ``milliseconds`` are the times predicted with each candidate: of a reduction, as far
    as nothing hides it (`advise`), or of a step (`CompressionState.advise`).
    """

    compressor: str
    milliseconds: Mapping[str, float]
    reason: str = field(repr=False)

    @property
    def verdict(self) -> str:
        """ "dense" or "compress"."""
        return "dense" if self.compressor == str(Identity()) else "compress"

    def __str__(self) -> str:
        return self.reason


def advise(
    numel: int,
    world_size: int,
    bandwidth: float,
    *,
    dtype: str = "float32",
    backward_ms: float = 0.0,
    latency_ms: float = 0.2,
    candidates: Sequence[str | Compressor] = CANDIDATES,
) -> Advice:
    """Whether compressing a reduction of ``numel`` elements pays.

    A model of the CPU kernels: nothing is measured, and nothing communicated.
    "identity" stands for no hook, too, which costs about the same.

    Parameters
    ----------
    numel : elements that are reduced together
    world_size : ranks
    bandwidth : bytes per second that a rank can send, while it receives as many
    dtype : "float32", "float64", "float16" or "bfloat16"
    backward_ms : computing that goes on meanwhile; what it hides costs nothing
    latency_ms : of the two messages that a rank sends to each other, together
    candidates : compressors, least lossy first

    Raises ValueError for numbers that make no sense.
    """
    _check_numbers(numel, world_size, bandwidth, dtype, backward_ms, latency_ms)
    names, coders = read_candidates(candidates)
    costs = []
    for coder in coders:
        member = effective(Member("", numel, 0, coder), dtype)
        nbytes = bytes_sent(member.compressor, numel, dtype, world_size)
        wire_ms = latency_ms + 1e3 * nbytes / bandwidth if world_size > 1 else 0.0
        kernel_ms = kernels_ms(member.compressor, numel, world_size)
        costs.append(max(0.0, wire_ms + kernel_ms - backward_ms))
    best = cheapest(costs, MARGIN)
    times = dict(zip(names, costs, strict=True))
    size = f"{human(numel * NBYTES[dtype])} over {world_size} ranks"
    hidden = f" behind {backward_ms:.0f} ms of computing" if backward_ms else ""
    reason = (
        f"{use(names[best])}: reducing {size} at {human(bandwidth)}/s"
        f"{hidden} takes {listed(times)}"
    )
    return Advice(names[best], times, reason)


def _check_numbers(
    numel: int,
    world_size: int,
    bandwidth: float,
    dtype: str,
    backward_ms: float,
    latency_ms: float,
) -> None:
    if not isinstance(dtype, str) or dtype not in NBYTES:
        raise ValueError(f"dtype must be one of {sorted(NBYTES)}, got {dtype!r}")
    for name, value, low in (("numel", numel, 0), ("world_size", world_size, 1)):
        checked_int(name, value, low)
    if checked_number("bandwidth", bandwidth) <= 0:
        raise ValueError(f"bandwidth must be bytes/s above 0, got {bandwidth!r}")
    for name, ms in (("backward_ms", backward_ms), ("latency_ms", latency_ms)):
        if checked_number(name, ms) < 0:
            raise ValueError(f"{name} must be 0 or more, got {ms!r}")


def read_list(candidates: Sequence[str | Compressor]) -> list[Compressor]:
    """The compressors; TypeError for what is no list, as a string form alone."""
    if not isinstance(candidates, (tuple, list)):
        raise TypeError(f"candidates must be a list of compressors, got {candidates!r}")
    return [read_compressor(candidate) for candidate in candidates]


def read_candidates(
    candidates: Sequence[str | Compressor],
) -> tuple[list[str], list[Compressor]]:
    """Their names and themselves, identity first where it is missing."""
    coders = read_list(candidates)
    if Identity() not in coders:
        coders.insert(0, Identity())
    return [short_name(coder) for coder in coders], coders


def short_name(coder: Compressor) -> str:
    """The short form where it is one of the usual candidates."""
    short = {str(read_compressor(name)): name for name in CANDIDATES}
    return short.get(str(coder), str(coder))


def cheapest(costs: Sequence[float], margin: float) -> int:
    """The number of the lowest cost, where each one has to be lower than the ones
    before it by a share of ``margin`` at least.

    >>> cheapest([100.0, 60.0, 58.0], 0.05)
    1
    """
    best = 0
    for number, cost in enumerate(costs):
        if cost < (1 - margin) * costs[best]:
            best = number
    return best


def bytes_sent(coder: Compressor, numel: int, dtype: str, world_size: int) -> float:
    """Bytes that a rank sends in both rounds, its share of them apart."""
    return 2 * (world_size - 1) / world_size * coder.body_nbytes(numel, dtype)


def kernels_ms(coder: Compressor, numel: int, world_size: int) -> float:
    """What a rank's kernels take, as `COPIES` has it.

    Each part of a sum beyond the second counts as decoding.
    """
    compress, add, decode = COPIES.get(short_name(coder), COPIES["quantize:bits=4"])
    copies = compress + decode
    if world_size > 1:
        copies += (add + (world_size - 2) * decode) / world_size
    return 1e3 * 4 * numel * copies / COPY_BYTES_PER_S


def use(name: str) -> str:
    """What to do."""
    return "stay dense" if name == "identity" else f"compress with {name}"


def listed(times: Mapping[str, float]) -> str:
    """Times by name."""
    return ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())


def human(value: float) -> str:
    """Bytes with a unit that suits them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
