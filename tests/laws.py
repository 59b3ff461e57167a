"""What the laws over all compressors share: coders, inputs and derived tolerances."""

from __future__ import annotations

import math

import torch

import commkern as ck
from commkern.compressors.block import BlockCoder
from commkern.dtypes import dtype_name

EVERY = [
    spec for name in ck.compressors() for spec in (name, *ck.compressor(name).examples)
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def coded(coder: ck.Compressor, tensor: torch.Tensor, **kwargs: int) -> torch.Tensor:
    return coder.decompress(coder.compress(tensor, **kwargs))


def compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def smallest(dtype: torch.dtype) -> float:
    """The smallest denormal."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def blocks(coder: ck.Compressor, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Pieces that are coded on their own, in fp64."""
    flat = tensor.reshape(-1).double()
    return list(flat.split(coder.granule(dtype_name(tensor.dtype))))


def tolerance(
    coder: ck.Compressor, absmax: float, largest: float, dtype: torch.dtype
) -> float:
    """How far a decoded element may be from its value, in a block with this absmax of a
    tensor with this largest magnitude.

    The compressor's own bound holds in exact arithmetic. On top come the roundings of
    the compute type, that to the output type, and half a denormal of the scale times
    the largest code.
    """
    bound = coder.error_bound(absmax, dtype_name(dtype), largest)
    if coder.error_bound(1.0, dtype_name(dtype)) == 0.0:
        return 0.0
    output = torch.finfo(dtype).eps * absmax / 2 + smallest(dtype)
    if torch.finfo(dtype).bits == 16:
        # What is decoded may be larger than the value, by the bound.
        output += torch.finfo(dtype).eps * bound / 2
    if not isinstance(coder, BlockCoder):
        return bound + output + 4 * torch.finfo(compute(dtype)).eps * absmax
    return bound + output + _arithmetic(coder, absmax, largest, dtype)


def _arithmetic(
    coder: BlockCoder, absmax: float, largest: float, dtype: torch.dtype
) -> float:
    """Four roundings (sum or scale, reciprocal, product, decoded product); with
    an offset eight, of numbers up to twice absmax, and its distance to the largest.

    A rotation of R values rounds log2(R) + 2 times each way, numbers up to R absmax;
    the errors of R values, added up, come back divided by sqrt(R).
    """
    fmt, eps = coder.block_format(), torch.finfo(compute(dtype)).eps
    magnitude = largest if fmt.scales == "span" else absmax
    roundings = 8.0 if fmt.has_offsets else 4.0
    underflow = (fmt.largest + 2) * smallest(compute(dtype)) / 2
    if not fmt.rotation:
        return roundings * eps * magnitude + underflow
    roundings += 2 * (math.log2(fmt.rotation) + 2)
    return fmt.rotation * (roundings * eps * largest + 4 * underflow)


def assert_within_bound(coder: ck.Compressor, tensor: torch.Tensor, seed: int) -> None:
    __tracebackhide__ = True
    decoded = coded(coder, tensor, seed=seed)
    largest = tensor.double().abs().max().item()
    pairs = zip(blocks(coder, tensor), blocks(coder, decoded), strict=True)
    for before, after in pairs:
        limit = tolerance(coder, before.abs().max().item(), largest, tensor.dtype)
        error = (before - after).abs()
        if torch.finfo(tensor.dtype).bits == 16:
            # Past the largest 16-bit number lies Inf.
            beyond = before.abs() + limit > torch.finfo(tensor.dtype).max
            error = error[~(beyond & after.isinf())]
        assert (error <= limit).all(), (error.max().item(), limit)


def overflows(coder: ck.Compressor, tensor: torch.Tensor) -> bool:
    """A cast documents that overflow gives Inf, a rotation that it gives NaN."""
    wire = getattr(coder, "wire_dtype", None)
    if tensor.numel() == 0:
        return False
    if wire is not None:
        narrow = tensor.to(getattr(torch, wire(dtype_name(tensor.dtype))))
        return bool(narrow.isinf().any())
    rotation = coder.block_format().rotation if isinstance(coder, BlockCoder) else 0
    most = torch.finfo(compute(tensor.dtype)).max
    return rotation > 0 and tensor.double().abs().max().item() > most / rotation


def one_large(numel: int, large: float) -> torch.Tensor:
    tensor = random((numel,), torch.float64)
    tensor[77 % numel] = large
    return tensor


INPUTS = {
    "normal": lambda dtype: random((7, 300), dtype),
    "one element": lambda dtype: random((1,), dtype),
    "all equal": lambda dtype: torch.full((500,), -0.3, dtype=dtype),
    "all positive": lambda dtype: (random((500,), torch.float64).abs() + 5).to(dtype),
    "one large": lambda dtype: one_large(500, 1000.0).to(dtype),
    "many scales": lambda dtype: (
        random((1000,), torch.float64) * 2.0 ** (torch.arange(1000) % 24 - 12)
    ).to(dtype),
    "blocks of many scales": lambda dtype: (
        random((2000,), torch.float64) * 2.0 ** (torch.arange(2000) // 250 * 3 - 12)
    ).to(dtype),
    "small": lambda dtype: random((500,), dtype) * torch.finfo(dtype).smallest_normal,
    "denormal": lambda dtype: (torch.arange(-250, 250).double() * smallest(dtype)).to(
        dtype
    ),
    "smallest denormal": lambda dtype: torch.full((500,), smallest(dtype)).to(dtype),
    "huge": lambda dtype: random((500,), dtype).clamp(-1, 1) * torch.finfo(dtype).max,
    "largest": lambda dtype: torch.full((500,), torch.finfo(dtype).max, dtype=dtype),
}
