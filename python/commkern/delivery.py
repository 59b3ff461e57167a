"""How a bucket's result, or what went wrong, gets back to DDP and its user."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch


class Backward:
    """When the backward pass of a step was through with its own computing."""

    ended_ns: int | None = None

    def end(self) -> None:
        """The pass has computed its last gradient, or there is none; first call."""
        if self.ended_ns is None:
            self.ended_ns = time.perf_counter_ns()

    def exposed_ns(self) -> int:
        """How long it has been waiting by now for what we do."""
        ended = self.ended_ns
        return 0 if ended is None else time.perf_counter_ns() - ended


def deliver(
    job: Future[torch.Tensor],
    buffer: torch.Tensor,
    backward: Backward,
    fill: Callable[[], None] | None = None,
) -> torch.futures.Future[torch.Tensor]:
    """The future that DDP waits for.

    A failure is raised by backward() itself, and outside of a backward pass (DDP's join
    calls the hook there) by the hook: DDP loses an exception of the future, or turns it
    into a cast error. ``fill`` writes what belongs into the buffer once the job is
    done, well or not.
    """
    if not _raise_after_backward(job, backward):
        job.result()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def done(_: Future[torch.Tensor]) -> None:
        if fill is not None:
            fill()
        future.set_result(buffer)

    job.add_done_callback(done)
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
