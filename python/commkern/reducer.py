"""What becomes of a bucket, and of a step when its last bucket is through."""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from commkern import profiling
from commkern.bucket_plans import BucketPlans
from commkern.compose import Settings, saturation_limit
from commkern.delayed import Delay
from commkern.delivery import Backward, deliver
from commkern.dtypes import dtype_name
from commkern.errors import not_finite
from commkern.groups import GroupWorker, Outcome
from commkern.input_guard import InputGuard
from commkern.inputs import real_view
from commkern.plan import Plan
from commkern.policy import Policy
from commkern.row_tables import flat
from commkern.sampling import Sampler
from commkern.sparse import SparseBuckets
from commkern.stats import StepStats
from commkern.step_bounds import StepBounds
from commkern.stores import Stores
from commkern.timeline import StepTimes, Timeline
from commkern.units import Reading, Units
from commkern.watch import Watch
from commkern.widened import widened

_NAMES_SHOWN = 8


class Reducer:
    """Reduces the buckets of one module, and commits or drops each step.

    ``names`` maps the id of a parameter to its name; ``parameters`` are those that DDP
    reduces while they require a gradient, ``sparse`` the names of those with a sparse
    one.
    """

    def __init__(
        self,
        worker: GroupWorker,
        settings: Settings,
        policy: Policy,
        names: Mapping[int, str],
        stores: Stores,
        units: Units,
        *,
        parameters: Collection[torch.Tensor],
        sparse: Collection[str] = (),
        delay: Delay | None = None,
        sample_every: int = 0,
        check_inputs: bool = False,
    ) -> None:
        self.worker = worker
        self.stores = stores
        self.units = units
        self.delay = delay
        self.sparse = SparseBuckets(() if delay else sparse, settings)
        self.stats = StepStats()
        self.timeline = Timeline()
        self.after_step: Callable[[StepTimes, GroupWorker], None] | None = None
        self.before_first: Callable[[GroupWorker, Sequence[Any]], None] | None = None
        self.sampler = Sampler(sample_every)
        self.step = 0
        self._settings = settings
        self._policy = policy
        self._check_inputs = check_inputs
        self._dtypes: set[torch.dtype] = set()  # that were looked at
        self._watch = Watch()
        self._bounds = StepBounds(parameters)
        self._backward = Backward()  # of the newest step, as is
        self._scale = 1.0  # its loss scale
        # The newest bucket's job; weakly, as its result is the bucket.
        self._sent: Callable[[], Future[torch.Tensor] | None] = lambda: None
        self.plans = BucketPlans(names, policy, stores, settings, self._watch)
        self.begin_step()

    @property
    def seed(self) -> int:
        """Of the random draws."""
        return self._settings.seed

    @property
    def raises(self) -> bool:
        """Whether a step that is not finite is an error."""
        return self._settings.nonfinite == "raise"

    def move_to(self, worker: GroupWorker) -> None:
        """Go on in another group."""
        self.wait()
        self.worker = worker
        self.before_first = None
        self.plans.clear()
        self.begin_step()
        if self.delay is not None:
            self.delay.load({}, 1.0)

    def wait(self) -> None:
        """Until no step is on its way any more."""
        if self.delay is not None:
            self.delay.wait()

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept for the parameters between two steps."""
        self.wait()
        return self.stores.nbytes + (self.delay.nbytes if self.delay else 0)

    # --- a bucket -----------------------------------------------------------------

    def submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the group's worker."""
        return profiling.until_done("commkern::bucket", lambda: self._submit(bucket))

    def _submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        first, last = self._bounds.place(bucket)
        fill = None
        if first:
            self._backward = Backward()
        step = self._step_of(first=first)
        try:
            job, fill = self._start(bucket, step, first=first, last=last)
        except Exception as error:  # noqa: BLE001 - raised in its turn
            job = self._fail(error, step)
        self._sent = weakref.ref(job)
        return deliver(job, bucket.buffer(), self._backward, fill)

    def _start(
        self, bucket: Any, step: int, *, first: bool, last: bool
    ) -> tuple[Future[torch.Tensor], Callable[[], None] | None]:
        """The job whose end DDP is to wait for, and what writes its results into the
        bucket, if it does not itself."""
        if self.before_first is not None:
            self.before_first(self.worker, bucket.parameters())
            self.before_first = None
        buffer: torch.Tensor = bucket.buffer()
        sizes = self.plans.sizes(bucket.parameters(), buffer)
        dense = not buffer.is_sparse
        if not dense:
            self.sparse.check(sizes, buffer)
        elif buffer.dtype not in self._dtypes:
            real_view(buffer, self._compressors(sizes, step))
            self._dtypes.add(buffer.dtype)
        number, units = bucket.index(), None
        if first:
            units = self.units.read()
            self._scale = units.loss_scale or self.units.current.loss_scale
        backward, submitted = self._backward, self.timeline.clock()
        delay = self.delay
        if delay is not None and not self._policy.has_begun(step):
            delay = None
        guard = None
        if self._check_inputs and delay is None and dense:
            guard = InputGuard(buffer, sizes, bucket.parameters())

        def reduce(gradients: torch.Tensor) -> torch.Tensor:
            with self.worker.or_tell(step):
                with (
                    profiling.within("commkern::reduce"),
                    self._named(number, sizes, step),
                ):
                    self._run(sizes, gradients, step, units, submitted)
                    if guard is not None:
                        guard.settle()
                if last:
                    self._close_step(step, backward)
            return gradients

        if delay is None:
            given = buffer if guard is None else guard.copy
            return self.worker.submit(lambda: reduce(given)), None
        return delay.trade(
            self.worker.submit, reduce, buffer, sizes, scale=self._scale, last=last
        )

    def _fail(self, error: Exception, step: int) -> Future[torch.Tensor]:
        """A job that raises the error of a bucket that could not be handed over, behind
        those of earlier buckets, with which the other ranks still need help.

        So DDP finishes its pass; it refuses another one after an exception of a hook.
        """

        def fail() -> torch.Tensor:
            with self.worker.or_tell(step):
                raise error

        return self.worker.submit(fail)

    @contextmanager
    def _named(
        self, number: int, sizes: Mapping[str, int], step: int
    ) -> Iterator[None]:
        """Note on an exception which bucket it is about, once."""
        try:
            yield
        except Exception as error:
            add_note = getattr(error, "add_note", None)  # Python 3.10 has no notes
            if add_note is not None and not getattr(error, "__notes__", None):
                names = [*sizes][:_NAMES_SHOWN]
                more = ", ..." if len(sizes) > len(names) else ""
                add_note(
                    f"commkern: rank {self.worker.rank}, step {step}, bucket {number}: "
                    f"{', '.join(names)}{more}; "
                    f"compressors {self._compressors(sizes, step)}"
                )
            raise

    def _compressors(self, names: Iterable[str], step: int) -> str:
        try:
            coders = dict.fromkeys(self._policy.compressor(n, step) for n in names)
        except Exception as error:  # noqa: BLE001 - of the user's schedule
            return f"unknown ({error!r})"
        return ", ".join(map(str, coders))

    def _step_of(self, *, first: bool) -> int:
        """The step of a bucket that DDP hands over, the ``first`` of one or not."""
        if self.delay is None:
            sent = self._sent()
            if first and sent is not None:  # of a pass that was abandoned
                concurrent.futures.wait([sent])
            return self.step
        if first:
            before = self.delay.under_way  # asked first: it may end, and so commit, now
            self.delay.open_step(self.step if before is None else before + 1)
        return self.delay.step

    def _run(
        self,
        sizes: Mapping[str, int],
        buffer: torch.Tensor,
        step: int,
        units: Reading | None,
        submitted: int,
    ) -> None:
        """Reduce one bucket, the first of a step with its ``units``."""
        started = self.timeline.clock()
        if units is not None:
            self._open_step(units)
        if buffer.is_sparse:
            self._run_sparse(sizes, buffer, step, submitted, started)
            return
        data, stores = real_view(buffer), self.stores
        plan, new = self.plans.plan(self.worker, sizes, data.dtype, step)
        sampled = self.sampler.due(step)
        if new or sampled:
            self.timeline.note_extra()
        if sampled:
            self.sampler.take(plan, data, stores.residuals, seed=self.seed, step=step)
        given = None if stores.ledger is None else self._counted(data)
        with widened(stores.residuals, plan) as residuals:
            outcome = self.worker.run(
                plan,
                buffer,
                seed=self.seed,
                step=step,
                residuals=residuals,
                estimates=stores.estimates,
            )
        if stores.ledger is not None and given is not None:
            stores.ledger.note(plan.members, given, data)
        self._note(plan, outcome)
        self._watch.bucket_done(plan, outcome, data, step, look=sampled)
        self.stats.add(plan, outcome, self.timeline.clock() - started)
        self.timeline.add(plan, submitted, started, outcome.times)

    def _run_sparse(
        self,
        names: Iterable[str],
        buffer: torch.Tensor,
        step: int,
        submitted: int,
        started: int,
    ) -> None:
        """Reduce the one gradient of a bucket of DDP's that is sparse."""
        reduced = self.sparse.reduce(self.worker, names, buffer, step)
        result, plan, outcome, new = reduced
        if new:
            self.timeline.note_extra()
        if self.stores.ledger is not None:
            given = self._counted(flat(buffer))
            self.stores.ledger.note(plan.members, given, flat(result))
        buffer.copy_(result)  # takes new memory: others may share the old one
        self._note(plan, outcome)
        self.stats.add(plan, outcome, self.timeline.clock() - started)
        self.timeline.add(plan, submitted, started, outcome.times)

    def _counted(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of a bucket as the ledger counts it."""
        if self._settings.nonfinite != "saturate":
            return data.clone()
        limit = saturation_limit(dtype_name(data.dtype), self.worker.world_size)
        return data.nan_to_num(0.0, limit, -limit)

    # --- a step -------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what the buckets of an unfinished step told."""
        self._touched: set[int] = set()
        self._finite = True
        self.plans.open_step()
        self.timeline.begin()
        self.stores.forget_step()
        self.sampler.drop()
        self.stats.drop()

    def _open_step(self, units: Reading) -> None:
        self.begin_step()  # a backward pass before may have been abandoned
        self.stores.open_step()
        gradients, residuals = self.units.follow(units)
        self.stores.scale(gradients * residuals)

    def _note(self, plan: Plan, outcome: Outcome) -> None:
        rows = plan.residual_rows[outcome.touched]
        written = set(rows[rows >= 0].tolist())
        self._touched |= written
        self.stores.note(plan.members, written)
        self._finite &= outcome.finite

    def _close_step(self, step: int, backward: Backward) -> None:
        finite = self._finite
        self.stores.close_step(sorted(self._touched), finite=finite)
        self.sampler.close(step)
        exposed_ns = self._exposed_ns(backward)
        self.stats.close(step, committed=finite, exposed_ns=exposed_ns)
        self._watch.step_done(step, **self.stats.bytes())
        times = self.timeline.close(step, committed=finite)
        if self.plans.close_step():  # DDP's first bucket holds everything
            self.worker.release_scratch()
        self.step = step + 1
        self.begin_step()
        if self.after_step is not None:
            self.after_step(times, self.worker)
        if not finite and self.raises:
            raise not_finite(step)

    def _exposed_ns(self, backward: Backward) -> int:
        """How long a backward pass has been waiting for the step: its own or, where
        results come a step later, the next one."""
        waiting = self._backward
        return 0 if self.delay and waiting is backward else waiting.exposed_ns()
