"""Results that reach the optimizer one step later, while the next step computes."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from commkern.errors import NonFiniteError

Submit = Callable[[Callable[[], torch.Tensor]], "Future[torch.Tensor]"]


class _Flight:
    """One step's results, on their way or here; by parameter name.

    ``scale`` is the loss scale that they hold. ``done`` is the last bucket's job, None
    as long as DDP has not handed it over.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.scale = 1.0
        self.results: dict[str, torch.Tensor] = {}
        self.done: Future[torch.Tensor] | None = None
        self._error: Exception | None = None

    def job(
        self,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        gradients: torch.Tensor,
        pieces: Mapping[str, torch.Tensor],
        *,
        last: bool,
    ) -> Callable[[], torch.Tensor]:
        """Reduce one bucket; the last job raises what any of them raised."""

        def run() -> torch.Tensor:
            try:
                reduce(gradients)
            except Exception as error:
                self._error = self._error or error
                raise
            finally:
                self.results.update(pieces)
            if last and self._error is not None:
                raise self._error
            return gradients

        return run

    def fill(self, pieces: Mapping[str, torch.Tensor], scale: float) -> None:
        """Write the results into a bucket's gradients, in units of another loss scale;
        zeros where there is none."""
        for name, gradient in pieces.items():
            found = self.results.get(name)
            if found is None:
                gradient.zero_()
                continue
            gradient.copy_(found)
            if scale != self.scale:
                gradient.mul_(scale / self.scale)


class Delay:
    """Trades each step's gradients for the results of the step before.

    ``sizes`` are the elements of every parameter, ``dtypes`` those of the gradients
    that come.
    """

    def __init__(
        self, sizes: Mapping[str, int], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.sizes = sizes
        self._dtypes = dtypes
        self._newest: _Flight | None = None
        self._sent: Future[torch.Tensor] | None = None  # the newest job
        self._before = _landed({}, 1.0)
        self._met = False  # whether the ranks have reduced a step together

    def next_step(self, committed: Callable[[], int]) -> int:
        """The step that a new backward pass belongs to; ``committed`` gives the one
        behind all that are done, and is asked last: one may be done meanwhile."""
        for flight in (self._newest, self._before):  # the newest may be abandoned
            if flight is not None and flight.done is not None:
                return committed() if flight.done.done() else flight.step + 1
        return committed()

    def open_step(self, step: int) -> None:
        """The first bucket of a step comes."""
        if self._newest is not None and self._newest.done is not None:
            self._before, self._met = self._newest, True
        self._newest = _Flight(step)

    @property
    def step(self) -> int:
        """The step whose buckets come."""
        assert self._newest is not None
        return self._newest.step

    def trade(
        self,
        submit: Submit,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        buffer: torch.Tensor,
        sizes: Mapping[str, int],
        *,
        scale: float,
        last: bool,
    ) -> tuple[Future[torch.Tensor], Callable[[], None]]:
        """Send a copy of a bucket on its way.

        Returns the job of the step before, and what writes its results into the bucket
        once it is done. In the first step together, the bucket's own job: a rank whose
        peer waits for no result would otherwise go on alone, to a collective of DDP's
        that the peer never comes to.
        """
        before, flight = self._before, self._newest
        assert flight is not None
        assert before.done is not None
        gradients = buffer.clone()
        job = flight.job(reduce, gradients, _pieces(gradients, sizes), last=last)
        future = self._sent = submit(job)
        if last:
            flight.done = future
        flight.scale = scale
        bucket = _pieces(buffer, sizes)
        due = before.done if self._met else _unless_told_later(future)
        return due, lambda: before.fill(bucket, scale)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the results take: those that are due, and those of the
        step before until the next one begins."""
        flights = [flight for flight in (self._newest, self._before) if flight]
        held = [result for one in flights for result in one.results.values()]
        return sum(result.nbytes for result in held)

    def wait(self) -> None:
        """Until all that was sent on its way is done, well or not."""
        if self._sent is not None:
            concurrent.futures.wait([self._sent])

    def pending(self) -> dict[str, torch.Tensor]:
        """Copies of the results that the next step hands out, by parameter name: zeros
        where there is none, so that room for all of them can be made beforehand."""
        self.wait()
        newest = self._newest
        flight = newest if newest is not None and newest.done else self._before
        due = {name: found.clone() for name, found in flight.results.items()}
        for name, dtype in self._dtypes.items():
            if name not in due:
                due[name] = torch.zeros(self.sizes[name], dtype=dtype)
        return {name: due[name] for name in sorted(due)}

    def load(self, results: Mapping[str, torch.Tensor], scale: float) -> None:
        """Hand out these results next, which hold this loss scale, and forget what is
        on its way."""
        self._newest = None
        self._before, self._met = _landed(results, scale), False


def _landed(results: Mapping[str, torch.Tensor], scale: float) -> _Flight:
    flight = _Flight(-1)
    flight.scale = scale
    flight.results = {name: result.clone() for name, result in results.items()}
    flight.done = Future()
    flight.done.set_result(torch.zeros(0))
    return flight


def _unless_told_later(job: Future[torch.Tensor]) -> Future[torch.Tensor]:
    """A job, without the failure that belongs to its results."""
    told: Future[torch.Tensor] = Future()

    def done(_: Future[torch.Tensor]) -> None:
        error = job.exception()
        if error is None or isinstance(error, NonFiniteError):
            told.set_result(torch.zeros(0))
        else:
            told.set_exception(error)

    job.add_done_callback(done)
    return told


def _pieces(buffer: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    split = torch.split(buffer, list(sizes.values()))
    return dict(zip(sizes, split, strict=True))


# --- checkpoints ----------------------------------------------------------------------


def saved_pending(delay: Delay | None) -> dict[str, dict[str, torch.Tensor]]:
    """What a state_dict holds of a delay: the results that come next."""
    return {} if delay is None else {"pending": delay.pending()}


def check_pending(
    delay: Delay | None, saved: Mapping[str, Any], *, strict: bool
) -> None:
    """ValueError or TypeError for saved results that cannot be handed out."""
    here, there = delay is not None, "pending" in saved
    if strict and here != there:
        raise ValueError(f"delayed: this state has {here}, the saved one {there}")
    if delay is None or not there:
        return
    pending, sizes = saved["pending"], delay.sizes
    if not isinstance(pending, dict):
        raise TypeError(f"pending of the saved state must be a dict, got {pending!r}")
    unexpected = sorted(pending.keys() - sizes.keys())
    if strict and unexpected:
        raise ValueError(f"pending: unexpected parameters {unexpected}")
    for name in pending.keys() & sizes.keys():
        found = pending[name]
        if not isinstance(found, torch.Tensor) or not found.is_floating_point():
            what = getattr(found, "dtype", type(found).__name__)
            raise TypeError(
                f"pending result of {name!r}: expected a tensor of floats, got {what}"
            )
        if found.numel() != sizes[name]:
            raise ValueError(
                f"pending result of {name!r}: expected {sizes[name]} elements, got "
                f"{found.numel()}"
            )


def load_pending(delay: Delay | None, saved: Mapping[str, Any]) -> None:
    """Go on with the saved results, which `check_pending` has seen."""
    if delay is not None:
        delay.load(saved.get("pending", {}), saved.get("loss_scale") or 1.0)
