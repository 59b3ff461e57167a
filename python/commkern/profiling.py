"""Ranges in torch.profiler, at no cost where none runs.

A profile of the default kind records the thread that called backward only: there
``commkern::bucket`` lasts from the hook's call to the reduced bucket. Our own thread
shows ``commkern::reduce`` where the profile records all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

_NOTHING = contextlib.nullcontext()
T = TypeVar("T")


def within(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range on this thread, if a profiler runs."""
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING


def until_done(
    name: str, start: Callable[[], torch.futures.Future[T]]
) -> torch.futures.Future[T]:
    """What ``start`` returns, in a range from its call to the future's end, if a
    profiler runs.

    The future that is returned then ends behind the range, with the same value or
    exception.
    """
    if not profiler._is_profiler_enabled:
        return start()
    with record_function(name) as span:
        followed: torch.futures.Future[T] = span._call_end_callbacks_on_future(start())
    return followed
