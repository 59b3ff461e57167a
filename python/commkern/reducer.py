"""What becomes of a bucket, and of a step when its last bucket is through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from commkern.compose import Settings
from commkern.dtypes import dtype_name
from commkern.errors import NonFiniteError
from commkern.groups import GroupWorker, Outcome
from commkern.inputs import real_view
from commkern.layout import Member
from commkern.plan import Plan
from commkern.policy import Policy
from commkern.residuals import ResidualStore
from commkern.stats import StepStats
from commkern.timeline import StepTimes, Timeline

_PLANS_KEPT = 256


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
        grad_scaler: Any,
    ) -> None:
        self.worker = worker
        self.residuals = residuals
        self.stats = StepStats()
        self.timeline = Timeline()
        self.after_step: Callable[[StepTimes, GroupWorker], None] | None = None
        self.step = 0
        self.loss_scale: float | None = None
        self._settings = settings
        self._policy = policy
        self._names = names
        self._feedback = feedback
        self._grad_scaler = grad_scaler
        self._plans: dict[Any, Plan] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what the buckets of an unfinished step told."""
        self._touched: set[int] = set()
        self._finite = True
        self.timeline.begin()

    def move_to(self, worker: GroupWorker) -> None:
        """Go on in another group."""
        self.worker = worker
        self._plans.clear()
        self.begin_step()

    # --- a bucket -----------------------------------------------------------------

    def submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the group's worker."""
        buffer: torch.Tensor = bucket.buffer()
        parameters = bucket.parameters()
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        last, step = bucket.is_last(), self.step
        scale = self._grad_scaler.get_scale() if self._grad_scaler else None
        submitted = self.timeline.clock()

        def job() -> torch.Tensor:
            self._run(parameters, sizes, buffer, step, scale, last, submitted)
            return buffer

        return _deliver(self.worker.submit(job), buffer)

    def _run(
        self,
        parameters: list[torch.Tensor],
        sizes: list[int],
        buffer: torch.Tensor,
        step: int,
        scale: float | None,
        last: bool,
        submitted: int,
    ) -> None:
        """Reduce one bucket and, after the last one, close the step."""
        started = self.timeline.clock()
        self._follow_loss_scale(scale)
        plan = self._plan(parameters, sizes, real_view(buffer), step)
        outcome = self.worker.run(
            plan,
            buffer,
            seed=self._settings.seed,
            step=step,
            residuals=self.residuals,
        )
        self._note(plan, outcome)
        self.stats.add(plan, outcome, self.timeline.clock() - started)
        self.timeline.add(
            plan, submitted, started, outcome.kernel_ns, outcome.exchange_ns
        )
        if last:
            self._close_step(step)

    def _follow_loss_scale(self, scale: float | None) -> None:
        if scale is None or scale == self.loss_scale:
            return
        if self.loss_scale is not None:
            self.residuals.scale(scale / self.loss_scale)
        self.loss_scale = scale

    # --- a step -------------------------------------------------------------------

    def _note(self, plan: Plan, outcome: Outcome) -> None:
        used = (
            member.row
            for member, touched in zip(plan.members, outcome.touched, strict=True)
            if touched and member.residual is not None
        )
        self._touched.update(used)
        self._finite &= outcome.finite

    def _close_step(self, step: int) -> None:
        finite = self._finite
        if finite:
            self.residuals.commit(sorted(self._touched))
        self.stats.close(step, committed=finite)
        times = self.timeline.close(step)
        self.step = step + 1
        self.begin_step()
        if self.after_step is not None:
            self.after_step(times, self.worker)
        if not finite and self._settings.nonfinite == "raise":
            raise NonFiniteError(
                f"a gradient held NaN or Inf in step {step}; residuals are as before"
            )

    # --- layout -------------------------------------------------------------------

    def _plan(
        self,
        parameters: list[torch.Tensor],
        sizes: list[int],
        buffer: torch.Tensor,
        step: int,
    ) -> Plan:
        phase = self._policy.phase(step)
        key = (tuple(map(id, parameters)), buffer.dtype, phase)
        if key not in self._plans:
            self.timeline.compose()
            self.reserve(parameters)
            members, offset = [], 0
            for parameter, size in zip(parameters, sizes, strict=True):
                members.append(self._member(self.name(parameter), size, offset, step))
                offset += size
            dtype = dtype_name(buffer.dtype)
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = self.worker.plan(members, dtype, self._settings)
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
        """Residuals for the parameters that have none yet and need one."""
        if not self._feedback:
            return
        sizes = {}
        for parameter in parameters:
            name = self.name(parameter)
            if name not in self.residuals and not self._policy.is_exempt(name):
                sizes[name] = parameter.numel() * (1 + parameter.is_complex())
        if sizes:
            self.residuals.extend(sizes)


def _deliver(
    job: Future[torch.Tensor], buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """The future that DDP waits for. A failure is raised by backward() itself: DDP
    would turn an exception of the future into a cast error."""
    raised_by_backward = _raise_after_backward(job)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def done(job: Future[torch.Tensor]) -> None:
        error = job.exception()
        if error is None or raised_by_backward:
            future.set_result(buffer)
        else:
            future.set_exception(error)  # type: ignore[arg-type]

    job.add_done_callback(done)
    return future


def _raise_after_backward(job: Future[torch.Tensor]) -> bool:
    """Let backward() raise the job's exception once DDP has finished its own work.

    False outside of a backward pass (DDP's join calls the hook there).
    """
    engine = torch.autograd.Variable._execution_engine

    def check() -> None:
        job.result()

    try:
        # Twice queued: DDP's own callback is queued between the two, and runs between.
        engine.queue_callback(lambda: engine.queue_callback(check))
    except RuntimeError:
        return False
    return True
