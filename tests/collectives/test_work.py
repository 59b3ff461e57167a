"""How long a work is waited for, and what ends the wait."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch

from commkern import Work

SHORT = timedelta(seconds=0.01)


def test_a_wait_ends_with_the_time_out_and_the_job_goes_on():
    job = Future()
    work = Work(job)
    with pytest.raises(TimeoutError, match=r"not done within 0:00:00\.01"):
        work.wait(SHORT)
    assert not work.is_completed()
    job.set_result(torch.ones(1))
    assert work.wait(SHORT) is True


class JustTooLate(Future):
    """Ends in the moment in which a wait for its result does."""

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        finally:
            if not self.done():
                self.set_result(torch.ones(1))


def test_a_job_that_ends_as_the_time_is_up():
    with pytest.raises(TimeoutError, match="not done within"):
        Work(JustTooLate()).wait(SHORT)


def test_the_exception_of_a_job_is_raised_as_itself():
    job = Future()
    job.set_exception(TimeoutError("of the job"))
    with pytest.raises(TimeoutError, match="of the job"):
        Work(job).wait(SHORT)


def test_a_time_out_is_a_timedelta():
    with pytest.raises(TypeError, match=r"datetime\.timedelta or None, got 5"):
        Work(Future()).wait(5)
