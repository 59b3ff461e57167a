"""Runs that succeed."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.plans import buffers_of, data_of, gather_plan, results, run

from commkern.plan import PURPOSES


def expected_result(world_size, numel):
    return np.concatenate([data_of(rank, numel) for rank in range(world_size)])


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("numel", [0, 1, 5, 1000])
def test_everybody_gets_everything(way, world_size, numel):
    endpoints = way.endpoints(world_size)

    def rank_body(rank):
        plan = gather_plan(rank, world_size, numel)
        buffers = buffers_of(plan)
        times = run(plan, buffers, endpoints[rank])
        return times, buffers

    for times, buffers in results(world_size, rank_body):
        result = buffers["result"].view(np.float32)
        assert np.array_equal(result, expected_result(world_size, numel))
        assert (buffers["touched"] != 0).all()
        assert times.keys() == {*PURPOSES, "exchange"}
        assert all(type(ns) is int for ns in times.values())
        assert min(times["other"], times["exchange"]) > 0


def test_many_runs_of_one_plan(way):
    world_size, numel = 3, 17
    endpoints = way.endpoints(world_size)

    def rank_body(rank):
        plan = gather_plan(rank, world_size, numel, crc=True)
        for step in range(20):
            buffers = buffers_of(plan)  # other memory each time
            run(plan, buffers, endpoints[rank], step=step)
            assert np.array_equal(
                buffers["result"].view(np.float32), expected_result(world_size, numel)
            )
        return endpoints[rank].bytes_sent, plan.bytes_sent

    for sent, planned in results(world_size, rank_body):
        assert sent == 20 * (planned + 64 * (world_size - 1))


def test_only_the_parameters_that_a_rank_heard_of_are_touched(way):
    endpoints = way.endpoints(4)

    def rank_body(rank):
        plan = gather_plan(rank, 4, 3, ring=True)
        buffers = buffers_of(plan)
        run(plan, buffers, endpoints[rank])
        return buffers

    for rank, buffers in enumerate(results(4, rank_body)):
        touched = {int(p) for p in np.flatnonzero(buffers["touched"])}
        assert touched == {rank, (rank - 1) % 4}
        result = buffers["result"].view(np.float32).reshape(4, 3)
        heard = [data_of(r, 3) if r in touched else np.zeros(3) for r in range(4)]
        assert np.array_equal(result, np.stack(heard))


def test_both_runners_write_the_same_messages(monkeypatch):
    from tests.runtime.conftest import Way

    monkeypatch.delenv("COMMKERN_BACKEND", raising=False)
    written = {}
    for name in ("threads", "reference"):
        endpoints = Way(name).endpoints(3)
        if name == "reference":
            monkeypatch.setenv("COMMKERN_BACKEND", "reference")

        def rank_body(rank, endpoints=endpoints):
            plan = gather_plan(rank, 3, 40, crc=True)
            buffers = buffers_of(plan)
            run(plan, buffers, endpoints[rank], step=2**40 + 3)
            return buffers

        written[name] = results(3, rank_body)
    for one, other in zip(*written.values(), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert np.array_equal(one[name], other[name]), name
