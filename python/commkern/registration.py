"""What a state checks, and finds out, when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commkern.admission import plain_name
from commkern.compose import NONFINITE
from commkern.compressors import Compressor, Identity
from commkern.delayed import Delay
from commkern.feedback import Feedback
from commkern.inputs import (
    check_feedback,
    check_owing,
    check_rollback,
    checked_bool,
    real_view,
)
from commkern.layout import Member, check_names
from commkern.ledger import check_countable
from commkern.schedules import resolve


def check_coders(
    coders: Iterable[Compressor],
    feedback: Feedback | None,
    algorithm: str,
    world_size: int,
) -> None:
    """ValueError for a compressor that cannot be used with the other settings."""
    for coder in coders:
        check_feedback(coder, feedback)
        resolve(algorithm, coder.aggregation)
        coder.check_world_size(world_size)


def delay_of(trains: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Delay:
    """What holds results back for a step."""
    dtypes = {name: p.dtype.to_real() for name, p in trains.items()}
    return Delay(sizes, dtypes)


def check_switches(
    feedback: Feedback | None, nonfinite: str, learning_rate: Any, **switches: Any
) -> None:
    """ValueError and TypeError for settings that make no sense, or not together."""
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {NONFINITE}, got {nonfinite!r}")
    for what, value in switches.items():
        checked_bool(what, value)
    check_rollback(feedback, switches["rollback"])
    if learning_rate is not None:
        check_owing(feedback)
    if switches["ledger"]:
        check_countable(feedback)


def group_of(module: torch.nn.Module, process_group: Any) -> Any:
    """The process group to reduce over; ValueError where it is not DDP's."""
    if not isinstance(module, DistributedDataParallel):
        return process_group
    own = module.process_group
    given = process_group if process_group is not None else own
    if given is not own:
        raise ValueError(
            f"process_group is {given}, but the DDP module reduces over {own}"
        )
    return own


def _check_parameter(name: str, parameter: torch.Tensor, compressor: object) -> None:
    try:
        real_view(parameter, compressor)
    except TypeError as error:
        raise TypeError(f"parameter {plain_name(name)!r}: {error}") from None


def named_parameters(
    module: torch.nn.Module, compressor: object
) -> dict[str, torch.Tensor]:
    """Parameters by their name in the user's model. TypeError for what cannot be
    reduced, ValueError for names that random draws cannot tell apart."""
    if isinstance(module, DistributedDataParallel):
        ignored, module = module.parameters_to_ignore, module.module
    else:  # what DDP will read
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if parameter.requires_grad:
            _check_parameter(name, parameter, compressor)
        named[plain_name(name)] = parameter
    check_names([Member(name, 0, 0, Identity()) for name in named])
    return named
