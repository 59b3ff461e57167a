"""The state of the DDP hook: settings, residuals by parameter name, step, figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commkern import auto, checkpoint
from commkern.advice import CANDIDATES, Advice
from commkern.compose import NONFINITE, Settings
from commkern.compressors import Compressor
from commkern.feedback import Feedback
from commkern.feedback import feedback as read_feedback
from commkern.forecast import state_advice
from commkern.groups import worker
from commkern.inputs import checked_bool, checked_seed, real_view
from commkern.policy import Exempt, Policy, small_or_vector
from commkern.reducer import Reducer
from commkern.residuals import ResidualStore
from commkern.schedules import resolve


class CompressionState:
    """Settings and state of `compression_hook` for one DDP module.

    Parameters
    ----------
    process_group : the group of the DDP module; None is the default group
    compressor : a compressor or its string form, "auto" or `Auto`
        "auto" tries no compression, 8 bits and 4 bits in turn for 15 steps, and then
        keeps the fastest.
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
        compressor: str | Compressor | auto.Auto = "quantize:bits=8",
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
        self.feedback = read_feedback(feedback)
        self.compressor = auto.read(compressor, self.feedback, start_step)
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite must be one of {NONFINITE}, got {nonfinite!r}")
        checked_bool("rollback", rollback)
        checked_bool("deterministic", deterministic)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must have get_scale(), got {grad_scaler!r}")
        resolve(algorithm, self.compressor.aggregation)
        runs = worker(_group_of(module, process_group))
        self.compressor.check_world_size(runs.world_size)
        settings = Settings(
            op="avg",
            algorithm="two_shot" if deterministic else algorithm,
            nonfinite=nonfinite,
            feedback=str(self.feedback),
            rollback=rollback,
            deterministic=deterministic,
            seed=checked_seed(seed),
        )
        parameters = _named_parameters(module)
        self._parameter_names = list(parameters)
        self._policy = Policy(
            parameters, self.compressor, exempt=exempt, start_step=start_step
        )
        self.reducer = Reducer(
            runs,
            settings,
            self._policy,
            {id(p): name for name, p in parameters.items()},
            ResidualStore({}, rollback=rollback),
            feedback=self.feedback is not None,
            grad_scaler=grad_scaler,
        )
        if isinstance(self.compressor, auto.AutoChoice):
            self.reducer.after_step = self.compressor.after
        self.reducer.reserve([p for p in parameters.values() if p.requires_grad])

    @property
    def step(self) -> int:
        """The number of steps that are behind."""
        return self.reducer.step

    @step.setter
    def step(self, step: int) -> None:
        self.reducer.step = step

    @property
    def residuals(self) -> ResidualStore:
        """The residuals, committed ones by parameter name."""
        return self.reducer.residuals

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
        return self.reducer.stats.last() | memory

    def report(self) -> dict[str, str]:
        """The compressor of every parameter in the coming step, by name."""
        coder, step = self._policy.compressor, self.step
        return {name: str(coder(name, step)) for name in self._parameter_names}

    def advise(self, candidates: Sequence[str | Compressor] = CANDIDATES) -> Advice:
        """Whether compressing pays on this link, and with what: print it.

        Predicted from the last steps' times: a step with each of ``candidates`` (least
        lossy first), where what backward hides costs nothing.

        Collective: every rank calls it, between two steps. Raises ValueError before
        there are two steps that are alike.
        """
        return state_advice(self.reducer, self._policy.is_exempt, candidates)

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
        return checkpoint.full_state_dict(self)

    def rejoin(self, process_group: Any = None) -> None:
        """Go on in a new group after PeerLost.

        Ranks may be one step apart then: all go back to the lowest committed step.
        Collective over the new group. Model parameters are the caller's to broadcast.

        Raises ValueError where ranks are further apart.
        """
        joined = worker(process_group)
        self.compressor.check_world_size(joined.world_size)
        self.reducer.move_to(joined)
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
        if isinstance(self.compressor, auto.AutoChoice):
            self.compressor.rejoin(self.step)


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
