"""Work handles, shaped like those of torch.distributed."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


class Work:
    """A collective that was started with ``async_op=True``."""

    def __init__(self, job: concurrent.futures.Future[torch.Tensor]) -> None:
        self._job = job

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective is done; True, or its exception.

        Raises TimeoutError where ``timeout`` passes first; the collective goes on.
        """
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(
                f"timeout must be a datetime.timedelta or None, got {timeout!r}"
            )
        seconds = timeout.total_seconds() if timeout else None
        done, _ = concurrent.futures.wait([self._job], seconds)
        if not done:
            raise TimeoutError(f"not done within {timeout}")
        self._job.result()
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._job.done()

    def is_success(self) -> bool:
        """Whether the collective has ended without an exception."""
        return self._job.done() and self._job.exception() is None

    def exception(self) -> BaseException | None:
        """The exception of an ended collective, None otherwise."""
        return self._job.exception() if self._job.done() else None

    def result(self) -> list[torch.Tensor]:
        """The reduced tensor, in a list."""
        return [self._job.result()]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A torch future of ``[tensor]``."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._job.add_done_callback(_forward(future))
        return future


def _forward(
    future: torch.futures.Future[list[torch.Tensor]],
) -> Callable[[concurrent.futures.Future[torch.Tensor]], Any]:
    def done(job: concurrent.futures.Future[torch.Tensor]) -> None:
        error = job.exception()
        if error is None:
            future.set_result([job.result()])
        else:
            future.set_exception(error)  # type: ignore[arg-type]

    return done
