"""The state of the DDP hook: settings, residuals by parameter name, step, figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commkern import checkpoint
from commkern.compose import NONFINITE, Settings
from commkern.compressors import Compressor, Identity
from commkern.compressors import compressor as read_compressor
from commkern.dtypes import dtype_name
from commkern.errors import NonFiniteError
from commkern.feedback import Feedback
from commkern.feedback import feedback as read_feedback
from commkern.groups import GroupWorker, Outcome, worker
from commkern.inputs import check_feedback, checked_bool, checked_seed, real_view
from commkern.layout import Member
from commkern.plan import Plan
from commkern.residuals import ResidualStore
from commkern.schedules import resolve
from commkern.stats import StepStats

Exempt = Callable[[str, torch.Tensor], bool]


def small_or_vector(name: str, parameter: torch.Tensor) -> bool:
    """The default exemption: one-dimensional parameters and those below 1024 elements.

    Biases and norms matter more than their size, and gain nothing.
    """
    return parameter.dim() <= 1 or parameter.numel() < 1024


class CompressionState:
    """Settings and state of `compression_hook` for one DDP module.

    Parameters
    ----------
    process_group : the group of the DDP module; None is the default group
    compressor : a compressor or its string form
    feedback : "error", settings from ``commkern.feedback``, or None
    module : the model, or the DistributedDataParallel around it; names its parameters
    algorithm : "two_shot" or "auto"
    exempt : callable ``(name, parameter) -> bool``, or None to compress everything
        Exempt parameters travel uncompressed in the same messages. Must say the same on
        every rank.
    start_step : int
        Steps before it reduce without compression.
    seed : of the random draws, equal on all ranks
    nonfinite : "propagate", "raise" or "saturate"
        What becomes of NaN and Inf: they reach every rank (as NaN in their block);
        NonFiniteError on every rank; or NaN counts as 0 and Inf as the largest finite
        value divided by twice the world size.
    rollback : bool
        Keep two versions of the residuals, so that a step with a non-finite result
        leaves them as they were. Costs a second fp32 copy of the compressed parameters.
    deterministic : force the schedule that sums in rank order
    grad_scaler : a ``torch.amp.GradScaler``; residuals follow its scale exactly

    Raises ValueError and TypeError, with both values, for what makes no sense.
    """

    def __init__(
        self,
        process_group: Any = None,
        compressor: str | Compressor = "quantize:bits=8",
        *,
        module: torch.nn.Module,
        feedback: str | Feedback | None = "error",
        algorithm: str = "auto",
        exempt: Exempt | None = small_or_vector,
        start_step: int = 0,
        seed: int = 0,
        nonfinite: str = "propagate",
        rollback: bool = True,
        deterministic: bool = False,
        grad_scaler: Any = None,
    ) -> None:
        self.compressor = read_compressor(compressor)
        self.feedback = read_feedback(feedback)
        check_feedback(self.compressor, self.feedback)
        _check_choices(nonfinite, start_step, exempt)
        checked_bool("rollback", rollback)
        checked_bool("deterministic", deterministic)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must have get_scale(), got {grad_scaler!r}")
        resolve(algorithm, self.compressor.aggregation)
        self.worker: GroupWorker = worker(_group_of(module, process_group))
        self.compressor.check_world_size(self.worker.world_size)
        self._settings = Settings(
            op="avg",
            algorithm="two_shot" if deterministic else algorithm,
            nonfinite=nonfinite,
            feedback=str(self.feedback),
            rollback=rollback,
            deterministic=deterministic,
            seed=checked_seed(seed),
        )
        self.start_step = start_step
        self.step = 0
        self.loss_scale: float | None = None
        self._grad_scaler = grad_scaler
        parameters = _named_parameters(module)
        self._names = {id(p): name for name, p in parameters.items()}
        self._exempt_names = {
            name for name, p in parameters.items() if exempt and exempt(name, p)
        }
        self.residuals = ResidualStore({}, rollback=rollback)
        self._reserve([p for p in parameters.values() if p.requires_grad])
        self._plans: dict[Any, Plan] = {}
        self._stats = StepStats()
        self._begin_step()

    # --- what users ask -----------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Figures of the last finished step.

        step; bytes_sent (by this rank, headers included) and bytes_dense (the same
        messages uncompressed); compression_factor; kernel_ms, exchange_ms and hook_ms;
        committed (False after a step with a non-finite result); residual_norm (L2 over
        all parameters, in units of the sum); state_nbytes (memory of the residuals).
        """
        version = [self.residuals[name] for name in self.residuals.names()]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64) for r in version]
        norm = torch.stack(norms).norm().item() if norms else 0.0
        memory = {"residual_norm": norm, "state_nbytes": self.residuals.nbytes}
        return self._stats.last() | memory

    def report(self) -> dict[str, str]:
        """The compressor of every parameter, by name."""
        return {name: str(self._compressor(name)) for name in self._names.values()}

    def state_dict(self) -> dict[str, Any]:
        """Committed residuals by name and the step: tensors and plain values only.

        Belongs to this rank and world size; save one per rank.
        """
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Continue from `state_dict` of the same rank and world size, or from
        `full_state_dict` of any.

        Raises ValueError naming what differs. ``strict=False`` accepts missing and
        unexpected parameters and another compressor.
        """
        checkpoint.load_state_dict(self, state, strict=strict)

    def full_state_dict(self) -> dict[str, Any]:
        """The mean residual over all ranks, valid for any world size.

        Collective: every rank calls it, between two steps. The sum over ranks is kept;
        a resumed run is not equal in bits.
        """
        return checkpoint.full_state_dict(self, self.worker)

    def rejoin(self, process_group: Any = None) -> None:
        """Go on in a new group after PeerLost.

        Ranks may be one step apart then: all go back to the lowest committed step.
        Collective over the new group. Model parameters are the caller's to broadcast.

        Raises ValueError where ranks are further apart.
        """
        joined = worker(process_group)
        self.compressor.check_world_size(joined.world_size)
        self.worker = joined
        self._plans.clear()
        group = process_group if process_group is not None else dist.group.WORLD
        lowest = torch.tensor(self.step)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
        ahead = self.step - int(lowest)
        if ahead > 1:
            raise ValueError(
                f"this rank committed step {self.step}, another one {int(lowest)}; "
                "load a checkpoint"
            )
        if ahead == 1:
            self.residuals.undo()
            self.step -= 1
        self._begin_step()

    # --- the hook -----------------------------------------------------------------

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the group's worker; called by `compression_hook`."""
        buffer: torch.Tensor = bucket.buffer()
        parameters = bucket.parameters()
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        last, step = bucket.is_last(), self.step
        scale = self._grad_scaler.get_scale() if self._grad_scaler else None

        def job() -> torch.Tensor:
            self._run(parameters, sizes, buffer, step, scale, last)
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
    ) -> None:
        """Reduce one bucket and, after the last one, close the step."""
        started = time.perf_counter_ns()
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
        self._stats.add(plan, outcome, time.perf_counter_ns() - started)
        if last:
            self._close_step(step)

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
        self._stats.close(step, committed=finite)
        self.step = step + 1
        self._begin_step()
        if not finite and self._settings.nonfinite == "raise":
            raise NonFiniteError(
                f"a gradient held NaN or Inf in step {step}; residuals are as before"
            )

    def _begin_step(self) -> None:
        self._touched: set[int] = set()
        self._finite = True

    def _follow_loss_scale(self, scale: float | None) -> None:
        if scale is None or scale == self.loss_scale:
            return
        if self.loss_scale is not None:
            self.residuals.scale(scale / self.loss_scale)
        self.loss_scale = scale

    # --- layout -------------------------------------------------------------------

    def _plan(
        self,
        parameters: list[torch.Tensor],
        sizes: list[int],
        buffer: torch.Tensor,
        step: int,
    ) -> Plan:
        warming_up = step < self.start_step
        key = (tuple(map(id, parameters)), buffer.dtype, warming_up)
        if key not in self._plans:
            self._reserve(parameters)
            members, offset = [], 0
            for parameter, size in zip(parameters, sizes, strict=True):
                name = self._name(parameter)
                members.append(self._member(name, size, offset, warming_up))
                offset += size
            dtype = dtype_name(buffer.dtype)
            self._plans[key] = self.worker.plan(members, dtype, self._settings)
        return self._plans[key]

    def _member(self, name: str, size: int, offset: int, dense: bool) -> Member:
        if dense or name not in self.residuals:
            coder = Identity() if dense else self._compressor(name)
            return Member(name, size, offset, coder)
        place, row = self.residuals.offset(name), self.residuals.row(name)
        return Member(name, size, offset, self._compressor(name), place, row)

    def _compressor(self, name: str) -> Compressor:
        return Identity() if name in self._exempt_names else self.compressor

    def _name(self, parameter: torch.Tensor) -> str:
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(parameter.shape)} that is "
                "not in the module that this state was made for"
            ) from None

    def _reserve(self, parameters: list[torch.Tensor]) -> None:
        """Residuals for the parameters that have none yet and need one."""
        if self.feedback is None:
            return
        sizes = {}
        for parameter in parameters:
            name = self._name(parameter)
            if name not in self.residuals and name not in self._exempt_names:
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


def _check_choices(nonfinite: str, start_step: int, exempt: Exempt | None) -> None:
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {NONFINITE}, got {nonfinite!r}")
    if not isinstance(start_step, int) or start_step < 0:
        raise ValueError(f"start_step must be an int, 0 or more, got {start_step!r}")
    if exempt is not None and not callable(exempt):
        raise TypeError(f"exempt must be callable or None, got {exempt!r}")


def _group_of(module: torch.nn.Module, process_group: Any) -> Any:
    if not isinstance(module, DistributedDataParallel):
        return process_group
    own = module.process_group
    given = process_group if process_group is not None else own
    if given is not own:
        raise ValueError(
            f"process_group is {given}, but the DDP module reduces over {own}"
        )
    return own


def _named_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by their name in the user's model. TypeError for what cannot be
    reduced."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}"
        )
    if isinstance(module, DistributedDataParallel):
        module = module.module
    named: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        real_view(parameter)
        named[name.replace("_orig_mod.", "")] = parameter
    return named
