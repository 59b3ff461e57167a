"""Ranges in torch.profiler, at no cost where none runs.

A profile of the default kind records the thread that called backward only: there
``commkern::bucket`` lasts from the hook's call to the reduced bucket. Our own thread
shows ``commkern::reduce`` where the profile records all threads.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

_NOTHING = contextlib.nullcontext()
T = TypeVar("T")


def within(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range on this thread, if a profiler runs."""
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING


def until_done(name: str, future: torch.futures.Future[T]) -> torch.futures.Future[T]:
    """A range from now to the end of ``future``, if a profiler runs.

    Returns a future with the same value or exception, which ends behind the range.
    """
    if not profiler._is_profiler_enabled:
        return future
    with record_function(name) as span:
        followed: torch.futures.Future[T] = span._call_end_callbacks_on_future(future)
    return followed
