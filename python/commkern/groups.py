"""One worker per process group: runs every commkern call on it, in call order."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commkern import runner
from commkern.arrays import Bytes, as_bytes, byte_view
from commkern.compose import Settings, compose
from commkern.errors import CommkernError, NonFiniteError
from commkern.layout import Member
from commkern.plan import EXTERNAL, FLAGS, Plan
from commkern.residuals import ResidualStore
from commkern.transports import EndpointTransport, ProcessGroupTransport
from commkern.workspace import Movable, Workspace

_PLANS_KEPT = 256
_NOTHING: Bytes = np.zeros(0, dtype=np.uint8)
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What one run of a plan tells: which parameters any rank used, and whether every
    value of the result is finite. ``times`` is what `runner.run` returns."""

    touched: np.ndarray[Any, np.dtype[np.bool_]]
    finite: bool
    bytes_sent: int
    times: dict[str, int]


class GroupWorker:
    """Runs the commkern calls on one process group, one after another.

    Asynchronous ones (and the hook's) run in a thread of its own, synchronous ones on
    the calling thread when their turn has come.

    The first failure of a run poisons the group: later calls raise the same error,
    because messages of the failed run may still be on their way. So does whatever else
    fails within `or_tell`, because this rank then is behind the others.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.rank: int = transport.rank
        self.world_size: int = transport.world_size
        self._calls = 0
        self._order = threading.Lock()  # guards `_waiting` and the order of submission
        self._turn = threading.Lock()  # held by the job that runs
        self._waiting = 0
        self._executor = ThreadPoolExecutor(1, f"commkern-rank{self.rank}")
        self._workspace = Workspace()
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._error: Exception | None = None
        weakref.finalize(self, self._executor.shutdown, wait=False)

    def count_call(self) -> int:
        """The number of this call on the group: the step of calls without a state.

        Called in turn, before anything can fail: ranks count alike.
        """
        self._calls += 1
        return self._calls - 1

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on the worker's thread, after those that were submitted before."""
        with self._order:
            self._waiting += 1
            return self._executor.submit(self._in_turn, job)

    def call(self, job: Callable[[], T]) -> T:
        """Run a job after those that were submitted before, and wait for it.

        Runs on the calling thread where no other job waits: on busy cores two changes
        of thread cost as much as reducing a megabyte.
        """
        with self._order:
            alone = self._waiting == 0
            self._waiting += 1
            if not alone:
                behind = self._executor.submit(self._in_turn, job)
        return self._in_turn(job) if alone else behind.result()

    def _in_turn(self, job: Callable[[], T]) -> T:
        try:
            with self._turn:
                if self._error is not None:
                    raise _without_frames(self._error)
                return job()
        finally:
            with self._order:
                self._waiting -= 1

    @contextlib.contextmanager
    def or_tell(self, step: int) -> Iterator[None]:
        """In a job: an exception is told to the other ranks, which may be waiting for
        this one in ``step`` or soon will be, and poisons the group.

        Not a NonFiniteError, which ranks raise alike.
        """
        try:
            yield
        except NonFiniteError:
            raise
        except BaseException as error:
            self._give_up(error, step)
            raise

    def _give_up(self, error: BaseException, step: int) -> None:
        """Poison the group and tell the others, once."""
        if self._error is not None:
            return
        interrupted = CommkernError(f"an earlier call was interrupted by {error!r}")
        known = error if isinstance(error, Exception) else interrupted
        self._error = _without_frames(known)
        with contextlib.suppress(Exception):  # the group may be gone
            self.transport.give_up(error, step)

    def release_scratch(self) -> None:
        """Forget the buffers of plans that ran; the next ones make theirs. Called in
        turn, like `run`."""
        self._workspace = Workspace()

    def plan(self, members: Sequence[Member], dtype: str, settings: Settings) -> Plan:
        """The plan for this layout under these settings, built once."""
        key = (tuple(members), dtype, settings)
        plan = self._plans.get(key)
        if plan is None:
            plan = compose(
                members,
                dtype,
                rank=self.rank,
                world_size=self.world_size,
                settings=settings,
            )
            self._plans[key] = plan
            if len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def run(
        self,
        plan: Plan,
        data: torch.Tensor,
        *,
        seed: int,
        step: int,
        residuals: ResidualStore | None = None,
        estimates: ResidualStore | None = None,
    ) -> Outcome:
        """Reduce ``data`` (flat, contiguous) in place; called on the worker's thread.

        Elements of parameters that no rank used become 0, and their residual is one
        that the caller must not commit. ``estimates`` are the running sums of plans
        whose feedback accumulates.
        """
        try:
            workspace = self._workspace.views(plan)
            for name in FLAGS:
                workspace.arrays[name].fill(0)
            movable = Movable(byte_view(data), workspace)
            buffers = _external(movable["data"], residuals, estimates)
            buffers |= workspace.arrays
            sent = self.transport.bytes_sent
            started = time.perf_counter_ns()
            bound = self.transport.bind(plan, movable, step)
            posted_ns = time.perf_counter_ns() - started  # the receives
            ordered = [buffers[name] for name in plan.buffers]
            times = runner.run(plan, ordered, {"seed": seed, "step": step}, bound)
        except BaseException as error:
            self._give_up(error, step)
            raise
        touched = workspace.arrays["touched"].astype(bool)
        self._clear_untouched(plan, data, touched)
        return Outcome(
            touched=touched,
            finite=not workspace.arrays["nonfinite"].any(),
            bytes_sent=self.transport.bytes_sent - sent,
            times=times | {"exchange": times["exchange"] + posted_ns},
        )

    @staticmethod
    def _clear_untouched(
        plan: Plan, data: torch.Tensor, touched: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> None:
        for index in np.flatnonzero(~touched):
            member = plan.members[index]
            data[member.offset : member.offset + member.numel] = 0


def _without_frames(error: Exception) -> Exception:
    """A copy without traceback: its frames hold the group, which would never close."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - copying runs code of the exception type
        return CommkernError(f"an earlier call failed with {error!r}")


def _external(data: torch.Tensor, *stores: ResidualStore | None) -> dict[str, Bytes]:
    """The buffers that the caller owns; ``data`` are bytes."""
    owned = [data.numpy()]
    for store in stores:
        if store is None:
            owned += [_NOTHING] * 3
        else:
            owned += [as_bytes(t) for t in (*store.versions, store.committed)]
    return dict(zip(EXTERNAL, owned, strict=True))


_WORKERS: weakref.WeakKeyDictionary[Any, GroupWorker] = weakref.WeakKeyDictionary()
# A forked child has the locks of its parent's workers, but not their threads.
os.register_at_fork(after_in_child=_WORKERS.clear)


def worker(group: Any = None) -> GroupWorker:
    """The worker of a process group (None: the default group), made at first use.

    ``group`` may also be an endpoint of a group of threads (``commkern.testing``).
    Raises ValueError without a default group, and where this rank is not a member.
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "no process group: call torch.distributed.init_process_group first, "
                "or pass group="
            )
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group")
    over_processes = isinstance(group, dist.ProcessGroup)
    if not over_processes and not hasattr(group, "bind"):
        raise TypeError(
            f"group must be a process group or None, got {type(group).__name__}"
        )
    if group not in _WORKERS:
        transport = ProcessGroupTransport if over_processes else EndpointTransport
        _WORKERS[group] = GroupWorker(transport(group))
    return _WORKERS[group]
