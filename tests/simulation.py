"""What a reduction gives, simulated in one process over whole tensors.

Bits are a function of (parameter, offset, step), so a simulation that knows nothing of
owners, chunks, messages or buckets must give the same bits. Where a scale belongs to an
owner's share, the simulation knows the shares as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from commkern import reference
from commkern.compressors import Compressor, compressor
from commkern.compressors.base import WHO_REDUCED, Operands
from commkern.dtypes import dtype_name
from commkern.layout import chunk_bounds, stages_of
from commkern.spans import SpanTable, one_span, span_table
from commkern.wire.crc import hash_text
from commkern.wire.message import align


def call(calls) -> None:
    for name, fields in calls:
        getattr(reference, name)(**fields)


def two_shot(
    coder: str | Compressor,
    tensors: Sequence[torch.Tensor],
    *,
    average: bool = False,
    residuals: Sequence[torch.Tensor] | None = None,
    name: str = "",
    seed: int = 0,
    step: int = 0,
) -> torch.Tensor:
    """The result on every rank. ``residuals`` (fp32, one a rank) are updated: each with
    its own coding error, and the first also with the owners' error, wherever it is."""
    coder = compressor(coder)
    dtype, numel, size = dtype_name(tensors[0].dtype), tensors[0].numel(), len(tensors)
    result = torch.empty(numel, dtype=tensors[0].dtype)
    scale = 1.0 / size if average else 1.0
    if coder.is_plain and residuals is None:
        parts = [tensor.contiguous() for tensor in tensors]
        summed = {"spans": one_span(numel), "parts": parts, "output": result}
        reference.sum(**summed, dtype=dtype, scale=scale)
        return result.reshape(tensors[0].shape)
    spans, nbytes = _spans(coder, numel, dtype, hash_text(name), size)
    *payloads, reduced = (np.zeros(nbytes, np.uint8) for _ in range(size + 1))
    whole = Operands(spans, dtype, seed, step, world_size=size)
    for on in stages_of(coder, whole, reduced):
        for rank, tensor in enumerate(tensors):
            mine = replace(on, who=rank, residual=_fed(residuals, rank))
            call(coder.compress_calls(mine, tensor.contiguous(), payloads[rank]))
        owner = replace(on, who=WHO_REDUCED, residual=_fed(residuals, 0))
        call(coder.reduce_calls(owner, payloads, reduced))
    call(coder.decompress_calls(owner, reduced, result, scale=scale))
    return result.reshape(tensors[0].shape)


def _spans(
    coder: Compressor, numel: int, dtype: str, parameter_id: int, world_size: int
) -> tuple[SpanTable, int]:
    """The whole tensor, or its shares where they matter; and the bytes of all."""
    if not coder.whole_shares:
        nbytes = coder.body_nbytes(numel, dtype)
        return one_span(numel, parameter_id=parameter_id), nbytes
    rows, body = [], 0
    for owner in range(world_size):
        begin, end = chunk_bounds(
            numel, coder.granule(dtype), world_size, owner, parameter_id
        )
        place = {"offset": begin, "begin": begin, "residual": begin, "body": body}
        rows.append(place | {"length": end - begin, "parameter_id": parameter_id})
        body += align(coder.body_nbytes(end - begin, dtype), coder.alignment(dtype))
    return span_table(rows), body


def _fed(residuals, rank):
    return None if residuals is None else (residuals[rank], residuals[rank])


def gradient(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Gaussian values with outliers, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values[:: max(1, numel // 3)] *= 50
    return values.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN equals the same NaN)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(a, b))
