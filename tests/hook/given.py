"""A model whose gradients are whatever its forward is given, in bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tests.simulation import two_shot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commkern as ck
from commkern.dtypes import dtype_name
from commkern.layout import Member, effective

Values = Mapping[str, torch.Tensor]


class Given(nn.Module):
    """Parameters of zeros by name; ``forward(values).backward()`` makes the values
    their gradients."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(value)))

    def forward(self, values: Values) -> torch.Tensor:
        products = (
            real(parameter) * real(values[name])
            for name, parameter in self.named_parameters()
        )
        return sum(product.sum().to(torch.float64) for product in products)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex values as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def registered(
    values: Values, spec: str, bucket_view: bool = False, **settings
) -> tuple[DistributedDataParallel, ck.CompressionState]:
    """A DDP model for such values, and the state of the hook on it. Nothing is exempt,
    and there is error feedback wherever the compressor takes it."""
    ddp = DistributedDataParallel(Given(values), gradient_as_bucket_view=bucket_view)
    coder = ck.compressor(spec)
    settings.setdefault("feedback", "error" if coder.supports_feedback else None)
    return ddp, ck.register(ddp, coder, exempt=None, **settings)


def reduced(ddp: DistributedDataParallel, values: Values) -> dict[str, torch.Tensor]:
    """The gradients after a backward pass."""
    ddp.zero_grad()
    ddp(values).backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def simulated(spec: str, name: str, parts: list[torch.Tensor], **draws) -> torch.Tensor:
    """The average that the hook must give for these parts, one a rank, in bits."""
    flat = [real(part).reshape(-1) for part in parts]
    member = Member(name, flat[0].numel(), 0, ck.compressor(spec))
    coder = effective(member, dtype_name(flat[0].dtype)).compressor
    result = two_shot(coder, flat, average=True, name=name, **draws)
    result = result.reshape(real(parts[0]).shape)
    return torch.view_as_complex(result) if parts[0].is_complex() else result
