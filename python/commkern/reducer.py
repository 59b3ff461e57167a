"""What becomes of a bucket, and of a step when its last bucket is through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from commkern import profiling
from commkern.compose import Settings
from commkern.dtypes import dtype_name
from commkern.errors import NonFiniteError
from commkern.groups import GroupWorker, Outcome
from commkern.inputs import real_numel, real_view
from commkern.layout import Member
from commkern.ledger import Ledger
from commkern.plan import Plan
from commkern.policy import Policy
from commkern.residuals import ResidualStore
from commkern.sampling import Sampler
from commkern.stats import Backward, StepStats
from commkern.timeline import StepTimes, Timeline
from commkern.units import Reading, Units
from commkern.watch import Watch

_PLANS_KEPT = 256
Layout = tuple[int, ...]  # the ids of a bucket's parameters


class Reducer:
    """Reduces the buckets of one module, and commits or drops each step.

    ``names`` maps the id of a parameter to its name.
    """

    def __init__(
        self,
        worker: GroupWorker,
        settings: Settings,
        policy: Policy,
        names: Mapping[int, str],
        residuals: ResidualStore,
        *,
        feedback: bool,
        units: Units,
        ledger: Ledger | None,
        sample_every: int = 0,
    ) -> None:
        self.worker = worker
        self.residuals = residuals
        self.ledger = ledger
        self.units = units
        self.stats = StepStats()
        self.timeline = Timeline()
        self.after_step: Callable[[StepTimes, GroupWorker], None] | None = None
        self.sampler = Sampler(sample_every)
        self.step = 0
        self._settings = settings
        self._policy = policy
        self._names = names
        self._feedback = feedback
        self._plans: dict[Any, Plan] = {}
        self._layout_before: set[Layout] = set()
        self._watch = Watch()
        self._backward = Backward()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what the buckets of an unfinished step told."""
        self._layout: set[Layout] = set()
        self._touched: set[int] = set()
        self._finite = True
        self.timeline.begin()
        self.sampler.drop()
        self.stats.drop()
        if self.ledger is not None:
            self.ledger.forget_step()

    def move_to(self, worker: GroupWorker) -> None:
        """Go on in another group."""
        self.worker = worker
        self._plans.clear()
        self.begin_step()

    @property
    def stores(self) -> dict[str, ResidualStore]:
        """All that is kept for each parameter, by its key in a state_dict."""
        stores = {"residuals": self.residuals}
        return stores | (self.ledger.stores() if self.ledger is not None else {})

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the stores take."""
        return sum(store.nbytes for store in self.stores.values())

    @property
    def seed(self) -> int:
        """Of the random draws."""
        return self._settings.seed

    # --- a bucket -----------------------------------------------------------------

    def submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the group's worker."""
        buffer: torch.Tensor = bucket.buffer()
        parameters = bucket.parameters()
        sizes = _sizes(parameters, buffer)
        last, step = bucket.is_last(), self.step
        units = None
        if bucket.index() == 0:
            units, self._backward = self.units.read(), Backward()
        backward, submitted = self._backward, self.timeline.clock()

        def job() -> torch.Tensor:
            with profiling.within("commkern::reduce"):
                self._run(parameters, sizes, buffer, step, units, submitted)
                if last:
                    self._close_step(step, backward)
            return buffer

        return profiling.until_done(
            "commkern::bucket",
            lambda: _deliver(self.worker.submit(job), buffer, backward),
        )

    def _run(
        self,
        parameters: list[torch.Tensor],
        sizes: list[int],
        buffer: torch.Tensor,
        step: int,
        units: Reading | None,
        submitted: int,
    ) -> None:
        """Reduce one bucket."""
        started = self.timeline.clock()
        if units is not None:
            self._open_step(units)
        data = real_view(buffer)
        plan = self._plan(parameters, sizes, data, step)
        seed, sampled = self._settings.seed, self.sampler.due(step)
        if sampled:
            self.timeline.note_extra()
            self.sampler.take(plan, data, self.residuals, seed=seed, step=step)
        given = None if self.ledger is None else self._counted(data)
        outcome = self.worker.run(
            plan,
            buffer,
            seed=seed,
            step=step,
            residuals=self.residuals,
        )
        if self.ledger is not None and given is not None:
            self.ledger.note(plan.members, given, data)
        self._note(plan, outcome)
        self._watch.bucket_done(plan, outcome, data, look=sampled)
        self.stats.add(plan, outcome, self.timeline.clock() - started)
        self.timeline.add(plan, submitted, started, outcome.times)

    def _counted(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of a bucket as the ledger counts it."""
        if self._settings.nonfinite != "saturate":
            return data.clone()
        limit = torch.finfo(data.dtype).max / (2 * self.worker.world_size)
        return data.nan_to_num(0.0, limit, -limit)

    def _open_step(self, units: Reading) -> None:
        self.begin_step()  # a backward pass before may have been abandoned
        self.residuals.keep()
        gradients, residuals = self.units.follow(units)
        if gradients * residuals != 1.0:
            for store in self.stores.values():
                store.scale(gradients * residuals)

    # --- a step -------------------------------------------------------------------

    def _note(self, plan: Plan, outcome: Outcome) -> None:
        used = (
            member.row
            for member, touched in zip(plan.members, outcome.touched, strict=True)
            if touched and member.residual is not None
        )
        self._touched.update(used)
        self._finite &= outcome.finite

    def _close_step(self, step: int, backward: Backward) -> None:
        finite = self._finite
        if finite:
            self.residuals.commit(sorted(self._touched))
        if self.ledger is not None:
            self._count(self.ledger, finite=finite)
        self.sampler.close(step)
        self.stats.close(step, committed=finite, exposed_ns=backward.exposed_ns())
        self._watch.step_done(step, **self.stats.bytes())
        times = self.timeline.close(step)
        self._follow_layout()
        self.step = step + 1
        self.begin_step()
        if self.after_step is not None:
            self.after_step(times, self.worker)
        if not finite and self._settings.nonfinite == "raise":
            raise NonFiniteError(
                f"a gradient held NaN or Inf in step {step}; residuals are as before"
            )

    def _follow_layout(self) -> None:
        """Give scratch memory back after a rebuild: DDP's first bucket holds all."""
        if self._layout != self._layout_before:
            self.worker.release_scratch()
        self._layout_before = self._layout

    def _count(self, ledger: Ledger, *, finite: bool) -> None:
        if finite:
            ledger.commit()
        elif not self.residuals.rollback:  # the step's contribution is lost
            ledger.restart(self.residuals)

    # --- layout -------------------------------------------------------------------

    def _plan(
        self,
        parameters: list[torch.Tensor],
        sizes: list[int],
        buffer: torch.Tensor,
        step: int,
    ) -> Plan:
        phase = self._policy.phase(step)
        layout = tuple(map(id, parameters))
        self._layout.add(layout)
        key = (layout, buffer.dtype, phase)
        if key not in self._plans:
            self.timeline.note_extra()
            self.reserve(parameters)
            members, offset = [], 0
            for parameter, size in zip(parameters, sizes, strict=True):
                members.append(self._member(self.name(parameter), size, offset, step))
                offset += size
            dtype = dtype_name(buffer.dtype)
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = self.worker.plan(members, dtype, self._settings)
            self._watch.plan_built(self._plans[key], members, step)
        return self._plans[key]

    def _member(self, name: str, size: int, offset: int, step: int) -> Member:
        coder = self._policy.compressor(name, step)
        if name not in self.residuals:
            return Member(name, size, offset, coder)
        place, row = self.residuals.offset(name), self.residuals.row(name)
        return Member(name, size, offset, coder, place, row)

    def name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter; ValueError for one of another module."""
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(parameter.shape)} that is "
                "not in the module that this state was made for"
            ) from None

    def reserve(self, parameters: list[torch.Tensor]) -> None:
        """Room for the parameters that have none yet and need some."""
        sizes = {self.name(p): real_numel(p) for p in parameters}
        if self.ledger is not None:
            self.ledger.reserve(sizes)
        new = {
            name: size
            for name, size in sizes.items()
            if name not in self.residuals and not self._policy.is_exempt(name)
        }
        if new and self._feedback:
            self.residuals.extend(new)


def _sizes(parameters: list[torch.Tensor], buffer: torch.Tensor) -> list[int]:
    """Elements of each parameter in a bucket, in reals.

    Not those of ``bucket.gradients()``, which counts a complex element as one.
    """
    sizes = [real_numel(parameter) for parameter in parameters]
    if sum(sizes) != real_numel(buffer):
        raise TypeError(
            f"the parameters of this bucket hold {sum(sizes)} real numbers, DDP's "
            f"buffer {real_numel(buffer)} of dtype {buffer.dtype}: this version of "
            "torch cannot reduce complex parameters"
        )
    return sizes


def _deliver(
    job: Future[torch.Tensor], buffer: torch.Tensor, backward: Backward
) -> torch.futures.Future[torch.Tensor]:
    """The future that DDP waits for. A failure is raised by backward() itself, and
    outside of a backward pass (DDP's join calls the hook there) by the hook: DDP loses
    an exception of the future, or turns it into a cast error."""
    if not _raise_after_backward(job, backward):
        job.result()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    job.add_done_callback(lambda _: future.set_result(buffer))
    return future


def _raise_after_backward(job: Future[torch.Tensor], backward: Backward) -> bool:
    """Let backward() raise the job's exception once DDP has finished its own work, and
    note when the pass is through with its computing.

    False outside of a backward pass.
    """
    engine = torch.autograd.Variable._execution_engine

    def check() -> None:
        job.result()

    def computed() -> None:
        backward.end()
        engine.queue_callback(check)

    try:
        # Twice queued: DDP's own callback is queued between the two, and runs between.
        engine.queue_callback(computed)
    except RuntimeError:
        backward.end()
        return False
    return True
