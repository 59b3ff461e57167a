"""What a profile shows of the hook."""

from __future__ import annotations

import pytest
import torch
from tests.hook.models import batch, make
from torch.profiler import ProfilerActivity, profile

import commkern as ck

BUCKET, WORK = "commkern::bucket", "commkern::reduce"


def one_step(rank, world_size, everywhere):
    """Ranges of one profiled step: (name, thread, begin, end) in microseconds."""
    torch.manual_seed(0)
    ddp = make()
    ck.register(ddp, "quantize:bits=8")
    for step in range(2):  # DDP rebuilds its buckets after the first
        ddp(batch(rank, step)).sum().backward()
    settings = {}
    if everywhere:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        settings = {"experimental_config": config}
    with profile(activities=[ProfilerActivity.CPU], **settings) as found:
        ddp(batch(rank, 2)).sum().backward()
    after = ddp(batch(rank, 3)).sum()  # nothing is left behind
    after.backward()
    ranges = [
        (e.name, e.thread, e.time_range.start, e.time_range.end)
        for e in found.events()
        if e.name.startswith("commkern")
    ]
    return sorted(ranges, key=lambda found: found[2])


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_profile_shows_every_bucket(ranks, everywhere):
    for events in ranks.run(2, one_step, everywhere):
        buckets = [e for e in events if e[0] == BUCKET]
        work = [e for e in events if e[0] == WORK]
        assert len(buckets) == 2
        assert len(work) == (len(buckets) if everywhere else 0)
        assert all(end > begin for _, _, begin, end in buckets)
        for bucket, job in zip(buckets, work, strict=False):
            assert bucket[1] != job[1]  # the caller's thread, and the worker's
            assert bucket[2] <= job[2] <= job[3] <= bucket[3] + 1


def failing(rank, world_size):
    """A profiled step with an exception, which must stay what it is."""
    ddp = make()
    ck.register(ddp, "quantize:bits=8", nonfinite="raise")
    with (
        profile(activities=[ProfilerActivity.CPU]) as found,
        pytest.raises(ck.NonFiniteError),
    ):
        (ddp(batch(rank, 0)).sum() * float("nan")).backward()
    return sum(e.name == BUCKET for e in found.events())


def test_exceptions_pass_through_a_range(ranks):
    assert all(count > 0 for count in ranks.run(2, failing))


def without_profiler(rank, world_size):
    """Ranges that are opened where nothing is recorded."""
    from commkern import profiling

    opened, plain = [], profiling.record_function
    profiling.record_function = lambda *args: opened.append(args) or plain(*args)
    try:
        ddp = make()
        ck.register(ddp, "quantize:bits=8")
        ddp(batch(rank, 0)).sum().backward()
    finally:
        profiling.record_function = plain
    return opened


def test_no_range_is_opened_where_nothing_is_recorded(ranks):
    assert ranks.run(2, without_profiler) == [[], []]
