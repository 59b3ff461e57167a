"""Every compiled kernel on one thread against ``Tensor.copy_`` of the same elements.

Each case runs on every ISA of the machine (``-k avx512``; ``COMMKERN_ISA`` leaves one)
on 128 MiB of fp32, far outside the cache, or on ``COMMKERN_BENCH_MIB``. Before it is
timed, a stretch of its results is compared in bits with `commkern.reference`. Copies
and calls take turns: ``ratios["copy"]`` is the median over the rounds of a call's time
over that of the copies before and after it. ``nbytes`` is what a call reads and writes.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch

from commkern import kernels
from commkern.benchmarks.cases import Case, Data, cases, check
from commkern.benchmarks.interleaved import CLOCK, record
from commkern.benchmarks.one_thread import isas, one_thread, time_against

MIB = int(os.environ.get("COMMKERN_BENCH_MIB", "128"))
_ELEMENTS = MIB * 2**20 // 4


@pytest.mark.benchmark(group=f"kernels, {MIB} MiB of fp32, one thread", timer=CLOCK)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_kernel(benchmark: Any, isa: str, case: Case) -> None:
    data = _data(case.form)
    source, target = torch.from_numpy(data.dense[0]), _spare()
    with one_thread(isa):
        call = check(case, data)
        run = functools.partial(getattr(kernels, case.kernel), **call.fields)
        seconds, ratio = time_against(run, lambda: target.copy_(source))
    record(benchmark, seconds, nbytes=call.nbytes, ratios={"copy": ratio})


@functools.lru_cache(maxsize=1)
def _data(form: str) -> Data:
    return Data.of(form, _ELEMENTS)


@functools.cache
def _spare() -> torch.Tensor:
    return torch.zeros(_ELEMENTS)
