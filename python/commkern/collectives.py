"""Collectives over compressed payloads, shaped like those of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commkern.compose import Settings
from commkern.compressors import Compressor
from commkern.compressors import compressor as read_compressor
from commkern.dtypes import dtype_name
from commkern.feedback import Feedback
from commkern.feedback import feedback as read_feedback
from commkern.groups import GroupWorker, worker
from commkern.inputs import (
    check_feedback,
    check_writable,
    checked_bool,
    checked_name,
    checked_seed,
    real_view,
    reduce_op,
)
from commkern.layout import Member
from commkern.residuals import ResidualStore
from commkern.schedules import resolve
from commkern.work import Work


class ReduceState:
    """Error feedback for `all_reduce` outside DDP, kept by the caller.

    Residuals are keyed by the ``name`` given to `all_reduce`; each call is its own step
    and commits on its own. Nothing else tells tensors apart: calls with the same name,
    or with none, share one residual, and what one tensor's call held back is sent with
    the next call's tensor. Where their shapes or dtypes differ that raises ValueError;
    where they are alike it cannot be noticed. Give every tensor a name of its own.

    Parameters
    ----------
    feedback : "error", "error:decay=0.9", settings from ``commkern.feedback``, or None
    rollback : bool
        Keep the residual of the step before until a step is known to be finite (twice
        the memory). Without it, residuals are updated in place.
    """

    def __init__(
        self, feedback: str | Feedback | None = "error", *, rollback: bool = True
    ) -> None:
        self.feedback = read_feedback(feedback)
        if self.feedback is not None and self.feedback.accumulates:
            raise ValueError(
                f"feedback {str(self.feedback)!r} is for the DDP hook; a ReduceState "
                'takes "error", "error:decay=0.9" or None'
            )
        self.rollback = checked_bool("rollback", rollback)
        self._entries: dict[str, _Entry] = {}

    def entry(self, name: str, tensor: torch.Tensor) -> _Entry:
        """What is kept for a name; ValueError where shape or dtype differ from it."""
        found = self._entries.get(name)
        if found is None:
            store = ResidualStore({}, rollback=self.rollback)
            feeds = self.feedback is not None
            found = _Entry(tuple(tensor.shape), tensor.dtype, store, feeds=feeds)
            self._entries[name] = found
        if (found.shape, found.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise ValueError(
                f"{_called(name)} had shape {found.shape} and dtype {found.dtype} in "
                f"this state, got {tuple(tensor.shape)} and {tensor.dtype}; give each "
                "tensor a name of its own"
            )
        return found

    def residual(self, name: str | None) -> torch.Tensor:
        """A copy of the committed residual of a name, in units of the sum; None for
        that of the calls without one.

        Raises KeyError for a name that has none.
        """
        key = checked_name(name)
        found = self._entries[key]
        return found.residuals[key].clone().reshape(found.shape)


def _called(name: str) -> str:
    return repr(name) if name else "the tensor without a name"


class _Entry:
    """Residual (if it ``feeds`` one) and step count of one name."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        residuals: ResidualStore,
        *,
        feeds: bool,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.residuals = residuals
        self.feeds = feeds
        self.step = 0


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    compressor: str | Compressor = "identity",
    algorithm: str = "auto",
    state: ReduceState | None = None,
    name: str | None = None,
    seed: int = 0,
    deterministic: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks, in place; every rank gets the same bits.

    Parameters
    ----------
    tensor : fp32, fp64, fp16, bf16 or complex, any shape and strides, on the CPU
    op : ``ReduceOp.SUM`` or ``ReduceOp.AVG``
    group : a process group; None is the default group
    async_op : return a `Work` at once instead of waiting
    compressor : a compressor or its string form, ``"quantize:bits=8"``
    algorithm : "two_shot", or "auto" (two_shot for all compressors there are)
    state : keeps error feedback between calls; without one there is none
    name : key of the residual in ``state``; needed once it serves two tensors
        Calls without a name share one residual, whatever tensors they are given; see
        `ReduceState`. It also keys the random draws.
    seed : of the random draws, equal on all ranks
    deterministic : force the schedule that sums in rank order (two_shot)

    Raises ValueError and TypeError for bad arguments before anything is sent (on this
    rank alone: others are not told), MismatchError where ranks call with different
    arguments, PeerLost where a rank does not answer, PeerFailed where one reports a
    failure of its own.
    """
    coder = read_compressor(compressor)
    operation = reduce_op(op)
    resolve(algorithm, coder.aggregation)
    data = real_view(tensor)
    check_writable(tensor)
    key = checked_name(name)
    checked_bool("async_op", async_op)
    checked_bool("deterministic", deterministic)
    if state is not None and not isinstance(state, ReduceState):
        raise TypeError(f"state must be a ReduceState, got {type(state).__name__}")
    if state is not None:
        check_feedback(coder, state.feedback)
    runs = worker(group)
    coder.check_world_size(runs.world_size)
    settings = Settings(
        op=operation,
        algorithm="two_shot" if deterministic else algorithm,
        feedback=str(state.feedback if state else None),
        rollback=state.rollback if state else True,
        deterministic=deterministic,
        seed=checked_seed(seed),
    )
    entry = state.entry(key, data) if state else None
    job = _Job(runs, tensor, data, coder, settings, key, entry)
    if async_op:
        return Work(runs.submit(job))
    runs.call(job)
    return None


class _Job:
    """One all_reduce, as the worker runs it."""

    def __init__(
        self,
        runs: GroupWorker,
        tensor: torch.Tensor,
        data: torch.Tensor,
        coder: Compressor,
        settings: Settings,
        name: str,
        entry: _Entry | None,
    ) -> None:
        self._runs = runs
        self._tensor = tensor
        self._data = data
        self._settings = settings
        self._entry = entry
        self._residuals = entry.residuals if entry and entry.feeds else None
        place = None if self._residuals is None else 0
        self._member = Member(name, data.numel(), 0, coder, place)

    def __call__(self) -> torch.Tensor:
        step = self._count_step()
        with self._runs.or_tell(step):
            return self._reduce(step)

    def _reduce(self, step: int) -> torch.Tensor:
        member = self._member
        if self._residuals is not None and member.name not in self._residuals:
            self._residuals.extend({member.name: member.numel})
        data = self._data.contiguous()
        dtype = dtype_name(data.dtype)
        plan = self._runs.plan([member], dtype, self._settings)
        outcome = self._runs.run(
            plan,
            data.reshape(-1),
            seed=self._settings.seed,
            step=step,
            residuals=self._residuals,
        )
        if data.data_ptr() != self._tensor.data_ptr():
            complex_ = self._tensor.is_complex()
            result = torch.view_as_complex(data) if complex_ else data
            self._tensor.detach().copy_(result)
        if self._residuals is not None and outcome.finite and outcome.touched.any():
            self._residuals.commit([0])
        return self._tensor

    def _count_step(self) -> int:
        call = self._runs.count_call()
        if self._entry is None:
            return call
        self._entry.step += 1
        return self._entry.step - 1
