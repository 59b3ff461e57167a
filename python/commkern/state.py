"""The state of the DDP hook: settings, residuals by parameter name, step, figures."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commkern import auto, checkpoint, copies
from commkern.admission import check_module, unwrapped
from commkern.advice import CANDIDATES, Advice
from commkern.assignment import Choice, PerParameter
from commkern.compose import Settings
from commkern.compressors import Compressor
from commkern.feedback import Feedback
from commkern.feedback import feedback as read_feedback
from commkern.forecast import state_advice
from commkern.groups import worker
from commkern.inputs import checked_int, checked_seed, real_numel
from commkern.owner import check_owner
from commkern.per_rank import PerRank
from commkern.policy import Exempt, Policy, Predicate
from commkern.reducer import Reducer
from commkern.registration import (
    check_coders,
    check_switches,
    delay_of,
    group_of,
    named_parameters,
)
from commkern.residuals import ResidualStore
from commkern.sparse import check_delayed, sparse_names
from commkern.stores import Stores
from commkern.units import Units
from commkern.watch import registered
from commkern.widened import DTYPES, check_narrow


class CompressionState:
    """Settings and state of `compression_hook` for one DDP module.

    Parameters
    ----------
    process_group : the group of the DDP module
        None is the group of ``module`` where that is a DDP module, and the default
        group where it is not. Other ranks than those of DDP's group are refused, in the
        first backward pass where ``module`` is the bare model.
    compressor : a compressor or its string form, or one for each parameter
        A dict or list of pairs (pattern of names, compressor), of which the first that
        matches counts, or a callable ``(name, parameter) -> compressor``. "auto", or
        `Auto`, tries no compression, 8 bits and 4 bits in turn for 15 steps, and then
        keeps the fastest.
    feedback : "error", "error:decay=0.9", "ef21", their settings, or None
    module : the model, or the DistributedDataParallel around it; names its parameters
    algorithm : "two_shot" or "auto"
    exempt : `Exempt`, a callable ``(name, parameter) -> bool``, or None
        Exempt parameters travel uncompressed in the same messages; None exempts none.
        Must say the same on every rank. Parameters with a sparse gradient are exempt,
        whatever this and ``compressor`` say.
    start_step : int
        Steps before it reduce without compression.
    schedule : dict of a compressor's field to a number that changes with the step
        A number, `Exponential`, `Steps` or a callable ``step -> number``, for every
        compressor that has the field; ``"inner.bits"`` is a field of a nested one.
    dense_every : int or None
        Each so many steps one goes uncompressed, and takes along what was held back.
    delayed : bool
        Hand out each step's result in the next step, zeros in the first, so that the
        reduction goes on behind the next forward. Another algorithm: see docs/policies.
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
    learning_rate : callable, or None
        Returns the current rate: ``lambda: optimizer.param_groups[0]["lr"]``. When it
        changes from one step to the next, residuals are multiplied by old / new, so
        that the updates they stand for keep their size; a change to or from 0 leaves
        them as they are.
    ledger : bool
        Keep the sums that `check_ledger` compares: two fp64 copies of the parameters
        and, within a step, two of the gradients. Needs plain error feedback.
    sample_every : int
        In every so many steps, measure what compressing loses of each parameter; shown
        by `stats`. 0 never does. Need not be equal on all ranks.
    residual_dtype : "fp32" or "bf16"
        How residuals are kept between two steps. bf16 is half the memory and loses most
        of what error feedback is good for, see docs/guarantees. Not with ``ledger`` or
        EF21.
    check_inputs : bool
        For debugging: raise CommkernError, naming the parameters, where somebody writes
        into dense gradients while they are reduced. Costs a copy and passes. Nothing to
        find with ``delayed``, which copies. Need not be equal on all ranks.

    Raises ValueError and TypeError, with both values, for what makes no sense.
    """

    _saved: dict[str, Any]  # of a copy that is not bound

    @copies.remember_arguments
    def __init__(
        self,
        process_group: Any = None,
        compressor: Choice | auto.Auto = "quantize:bits=8",
        *,
        module: torch.nn.Module,
        feedback: str | Feedback | None = "error",
        algorithm: str = "auto",
        exempt: Predicate | None = Exempt(),  # noqa: B008 - frozen
        start_step: int = 0,
        schedule: Mapping[str, Any] | None = None,
        dense_every: int | None = None,
        delayed: bool = False,
        seed: int = 0,
        nonfinite: str = "propagate",
        rollback: bool = True,
        deterministic: bool = False,
        grad_scaler: Any = None,
        learning_rate: Callable[[], float] | None = None,
        ledger: bool = False,
        sample_every: int = 0,
        check_inputs: bool = False,
        residual_dtype: str = "fp32",
    ) -> None:
        self.feedback = read_feedback(feedback)
        switches = {
            "rollback": rollback,
            "deterministic": deterministic,
            "delayed": delayed,
            "ledger": ledger,
            "check_inputs": check_inputs,
        }
        check_switches(self.feedback, nonfinite, learning_rate, **switches)
        check_narrow(self.feedback, residual_dtype, ledger)
        module = unwrapped(module)
        check_module(module)
        runs = worker(group_of(module, process_group))
        choice = auto.read(
            compressor,
            start_step,
            feedback=self.feedback,
            schedule=schedule,
            delayed=delayed,
            dense_every=dense_every,
        )
        parameters = named_parameters(module, choice)
        self._parameter_names = list(parameters)
        sparse = sparse_names(module, parameters)
        check_delayed({name: parameters[name] for name in sparse}, delayed)
        self._policy = Policy(
            parameters,
            choice,
            exempt=exempt,
            start_step=start_step,
            schedule=schedule,
            dense_every=dense_every,
            plain=sparse,
        )
        check_coders(self._policy.known, self.feedback, algorithm, runs.world_size)
        units = Units(grad_scaler, learning_rate)
        settings = Settings(
            op="avg",
            algorithm="two_shot" if deterministic else algorithm,
            nonfinite=nonfinite,
            feedback=str(self.feedback),
            rollback=rollback,
            deterministic=deterministic,
            seed=checked_seed(seed),
            policy=f"{self._policy} delayed={delayed} {units} {residual_dtype=}",
        )
        dtype = DTYPES[residual_dtype]
        sizes = {name: real_numel(p) for name, p in parameters.items()}
        trains = {name: p for name, p in parameters.items() if p.requires_grad}
        self._reducer: Reducer | None = Reducer(
            runs,
            settings,
            self._policy,
            {id(p): name for name, p in parameters.items()},
            Stores(self.feedback, rollback=rollback, ledger=ledger, dtype=dtype),
            units,
            parameters=parameters.values(),
            sparse=sparse,
            delay=delay_of(trains, sizes) if delayed else None,
            sample_every=sample_every,
            check_inputs=check_inputs,
        )
        if not isinstance(module, DistributedDataParallel):
            self.reducer.before_first = partial(check_owner, weakref.ref(self))
        if isinstance(choice, auto.AutoChoice):
            self.reducer.after_step = choice.after
        self.reducer.plans.reserve({name: sizes[name] for name in trains})
        exempt_names = {name for name in parameters if self._policy.is_exempt(name)}
        registered(self, parameters, exempt_names)

    @property
    def reducer(self) -> Reducer:
        """What the buckets go through. ValueError in a copy that is not bound."""
        if self._reducer is None:
            raise ValueError(
                "this state is a copy (unpickled or deep-copied) and belongs to no "
                "module or process group yet: call state.bind(ddp) first"
            )
        return self._reducer

    @property
    def compressor(self) -> Compressor | PerParameter | auto.AutoChoice:
        """What was given, read: a compressor, or what says it for each parameter."""
        given: Compressor | PerParameter | auto.AutoChoice = self._policy.given
        return given

    @property
    def step(self) -> int:
        """The number of steps that are behind; waits for one that is on its way."""
        self.reducer.wait()
        return self.reducer.step

    @step.setter
    def step(self, step: int) -> None:
        checked_int("step", step, 0, 2**63)
        self.reducer.wait()
        self.reducer.step = step

    @property
    def residuals(self) -> ResidualStore:
        """The residuals, committed ones by parameter name."""
        self.reducer.wait()
        return self.reducer.stores.residuals

    def wait(self) -> None:
        """Until nothing is on its way (only with ``delayed``): before the process group
        is destroyed. What went wrong is raised by the next backward pass."""
        self.reducer.wait()

    # --- what users ask -----------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Figures of the last finished step; docs/telemetry.md explains each.

        step and committed (False after a step with a non-finite result); bytes_sent (by
        this rank, headers included), bytes_dense (the same messages uncompressed) and
        compression_factor; times in ms: hook_ms, of which compress_ms, wait_ms,
        reduce_ms, decompress_ms and other_ms, furthermore exposed_ms and
        last_bucket_ms; residual_norm (L2 over all parameters, in units of the sum);
        state_nbytes (memory of all that the state keeps for the parameters between two
        steps: versions of residuals and estimates, sums of the ledger, delayed
        results).

        ``total`` has the sums over all steps, with steps and skipped (those that were
        not committed). ``sampled``, None before there is one, tells of the last step
        measured for ``sample_every``: step, relative_error and residual_norm, both by
        parameter. ``sparse``, None before there is one, tells of parameters with a
        sparse gradient: the route that it took, its rows over all ranks, and of how
        many.
        """
        version = [self.residuals[name] for name in self.residuals.names()]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64) for r in version]
        norm = torch.stack(norms).norm().item() if norms else 0.0
        memory = {"residual_norm": norm, "state_nbytes": self.reducer.nbytes}
        more = {"sampled": self.reducer.sampler.last()}
        more["sparse"] = self.reducer.sparse.last()
        return self.reducer.stats.last() | memory | more

    def report(self) -> dict[str, str]:
        """The compressor of every parameter in the coming step, by name."""
        step, coder = self.step, self._policy.compressor
        return {name: str(coder(name, step)) for name in self._parameter_names}

    def advise(self, candidates: Sequence[str | Compressor] = CANDIDATES) -> Advice:
        """Whether compressing pays on this link, and with what: print it.

        Predicted from the last steps' times: a step with each of ``candidates`` (least
        lossy first), where what backward hides costs nothing.

        Collective: every rank calls it, between two steps. Raises ValueError, on every
        rank, before there are two steps that are alike.
        """
        self.wait()
        return state_advice(self.reducer, self._policy.is_exempt, candidates)

    def check_ledger(self) -> dict[str, float]:
        """How far results and residuals are from the gradients given, by parameter.

        Over all steps since the start (or since the sums last started anew: after
        `rejoin`, after loading a state without sums, and with ``rollback=False`` after
        a step that was not finite): sum of results + mean residual - mean sum of
        gradients, L2 relative to the largest of the three. Collective: every rank calls
        it, between two steps.

        Raises LedgerError on every rank where a parameter is off by more than 1e-5; for
        fp16 and bf16 gradients by more than 1e-5 and the rounding of the results.
        ValueError without ``ledger=True``.
        """
        reducer = self.reducer
        ledger = reducer.stores.ledger
        if ledger is None:
            raise ValueError("check_ledger() needs ledger=True, got ledger=False")
        return ledger.check(reducer.worker, self.step, [self.residuals])

    # --- saving, loading, copying -------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Committed residuals by name and the step: tensors and plain values only.

        Belongs to this rank and world size; save one per rank.
        """
        if self._reducer is None:
            return copy.deepcopy(self._saved)
        return checkpoint.state_dict(self)

    def load_state_dict(
        self, state: dict[str, Any], *, strict: bool = True, reset: bool = False
    ) -> None:
        """Continue from `state_dict` of the same rank and world size, or from
        `full_state_dict` of any.

        Raises ValueError and TypeError naming what differs or is damaged, and changes
        nothing then. ``strict=False`` accepts missing and unexpected parameters and
        another compressor, feedback and seed. ``reset=True`` takes over the step alone,
        from any rank's state: residuals become zero, and a warning says what was
        dropped.
        """
        checkpoint.load_state_dict(self, state, strict=strict, reset=reset)

    def full_state_dict(self) -> dict[str, Any]:
        """The mean residual over all ranks, valid for any world size.

        Collective: every rank calls it, between two steps. The sum over ranks is kept;
        a resumed run is not equal in bits.
        """
        return checkpoint.full_state_dict(self)

    def per_rank(self, saved_world_size: int | None = None) -> PerRank:
        """This state for ``torch.distributed.checkpoint``, in saving and in loading:
        ``dcp.save({"hook": state.per_rank()})``.

        To load what another number of ranks saved, give that number: every rank then
        reads the states of all of them and continues from their mean.
        """
        return PerRank(self, saved_world_size)

    def __getstate__(self) -> dict[str, Any]:
        return copies.pack(self)

    def __setstate__(self, packed: dict[str, Any]) -> None:
        copies.unpack(self, packed)

    def bind(
        self,
        module: torch.nn.Module,
        process_group: Any = None,
        *,
        grad_scaler: Any = None,
        learning_rate: Callable[[], float] | None = None,
    ) -> None:
        """Attach a pickled or deep-copied state to a module and its group.

        A copy holds the settings and what `state_dict` holds, but nothing that lives in
        one process; register the hook with it after this call. A state that is bound
        already moves to the new module.

        Raises ValueError where the module's parameters, the rank or the world size are
        others than those of the copied state, and where that followed a grad_scaler or
        a learning_rate and none is given.
        """
        followed = {"grad_scaler": grad_scaler, "learning_rate": learning_rate}
        copies.bind(self, module, process_group, followed)

    def rejoin(self, process_group: Any = None) -> None:
        """Go on in a new group after PeerLost.

        Ranks may be one step apart then: all go back to the lowest committed step.
        Collective over the new group. Model parameters are the caller's to broadcast.

        Raises ValueError, on every rank, where one cannot go back so far: ranks are
        further apart, a later step has begun there, or ``rollback`` is off.
        """
        reducer, joined = self.reducer, worker(process_group)
        for coder in self._policy.known:
            coder.check_world_size(joined.world_size)
        reducer.move_to(joined)
        group = process_group if process_group is not None else dist.group.WORLD
        back_to = self.step - self.residuals.can_undo
        agreed = torch.tensor([self.step, -back_to])
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
        lowest, reached = int(agreed[0]), -int(agreed[1])
        if reached > lowest:
            raise ValueError(
                f"the lowest committed step is {lowest}, but a rank can go back to "
                f"{reached} only (this one is at step {self.step}); load a checkpoint"
            )
        if self.step > lowest:
            reducer.stores.undo()
            self.step = lowest
        reducer.stores.rejoin(joined, self.step)
        if isinstance(self.compressor, auto.AutoChoice):
            self.compressor.rejoin(self.step)
