"""Transports in Python under the compiled runner, and the GIL."""

from __future__ import annotations

import threading
import time

import pytest
from tests.runtime.plans import buffers_of, gather_plan, outcomes, results

from commkern import runner
from commkern.errors import PeerFailed
from commkern.failure import Failure
from commkern.local_transport import LocalGroup
from commkern.runner import compiled

REGISTERS = {"seed": 0, "step": 0}


class Recorder:
    """Remembers every call and hands it on."""

    def __init__(self, bound=None, fail_in=None, error=None):
        self.calls = []
        self._bound = bound
        self._fail_in = fail_in
        self._error = error

    def _call(self, name, argument):
        self.calls.append((name, argument))
        if name == self._fail_in:
            raise self._error
        if self._bound is not None:
            getattr(self._bound, name)(argument)

    def post(self, number):
        self._call("post", number)

    def complete(self, number):
        self._call("complete", number)

    def abort(self, error):
        self._call("abort", error)


def run_with(plan, transport):
    buffers = buffers_of(plan)
    return runner.run(plan, list(buffers.values()), REGISTERS, transport)


def test_a_transport_is_called_twice_a_round():
    group = LocalGroup(2, 30.0)

    def rank_body(rank):
        plan = gather_plan(rank, 2, 5)
        bound = group.endpoint(rank).bind(plan, (buffers := buffers_of(plan)), 0)
        recorder = Recorder(bound)
        runner.run(plan, list(buffers.values()), REGISTERS, recorder)
        return recorder.calls

    assert results(2, rank_body) == [[("post", 0), ("complete", 0)]] * 2


@pytest.mark.parametrize("where", ["post", "complete"])
@pytest.mark.parametrize(
    "error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3)]
)
def test_an_exception_of_a_callback_arrives_as_itself_after_abort(where, error):
    recorder = Recorder(fail_in=where, error=error)
    with pytest.raises(type(error)) as caught:
        run_with(gather_plan(0, 2, 5), recorder)
    assert caught.value is error
    assert recorder.calls[-1] == ("abort", error)
    assert [name for name, _ in recorder.calls].count("abort") == 1


def test_a_transport_without_abort():
    class Bare:
        def post(self, number):
            raise KeyError(number)

        def complete(self, number):
            raise AssertionError

    with pytest.raises(KeyError):
        run_with(gather_plan(0, 2, 5), Bare())


def test_no_transport_at_all():
    with pytest.raises(AttributeError, match="post"):
        run_with(gather_plan(0, 1, 5), object())


def test_the_peers_of_a_failed_callback_learn_of_it(way):
    endpoints = way.endpoints(3)

    def rank_body(rank):
        plan = gather_plan(rank, 3, 5)
        buffers = buffers_of(plan)
        transport = endpoints[rank].bind(plan, buffers, 0)
        if rank == 0 and way.name != "threads":
            transport = Recorder(transport, "post", ZeroDivisionError("mine"))
        elif rank == 0:
            buffers["data"] = buffers["data"][:-1]
        return runner.run(plan, list(buffers.values()), REGISTERS, transport)

    begin = time.monotonic()
    found = outcomes(3, rank_body)
    assert time.monotonic() - begin < 15  # of 30
    assert type(found[0]) in (ZeroDivisionError, ValueError)
    assert [type(error) for error in found[1:]] == [PeerFailed] * 2
    assert [error.rank for error in found[1:]] == [0, 0]


def test_the_compiled_runner_aborts_by_itself():
    from commkern._core import ThreadGroup

    group = ThreadGroup(2, 30.0)

    def rank_body(rank):
        plan = gather_plan(rank, 2, 5)
        buffers = list(buffers_of(plan).values())
        if rank == 0:
            buffers[0] = buffers[0][:-1]
        return compiled(plan).run(buffers, [0, 0], group.endpoint(rank))

    begin = time.monotonic()
    small, told = outcomes(2, rank_body)
    assert time.monotonic() - begin < 15  # of 30
    assert type(small) is ValueError
    assert (type(told), told.kind, told.peer) == (Failure, "failed", 0)


def test_python_runs_on_while_a_rank_waits():
    from commkern._core import ThreadGroup

    plan = gather_plan(0, 2, 5)
    group = ThreadGroup(2, 60.0)
    endpoint = group.endpoint(0)
    waiting = threading.Thread(
        target=lambda: outcomes(1, lambda _: run_with(plan, endpoint))
    )
    waiting.start()
    steps = 0
    while waiting.is_alive() and steps < 50:
        time.sleep(0.001)
        steps += 1
    assert steps == 50
    group.endpoint(1).abort(RuntimeError("enough"))
    waiting.join()


def test_one_run_of_a_plan_at_a_time():
    plan = gather_plan(0, 2, 5)

    class Nested(Recorder):
        def post(self, number):
            with pytest.raises(ValueError, match="one run at a time"):
                compiled(plan).run(list(buffers_of(plan).values()), [0, 0], Recorder())
            super().post(number)

        def complete(self, number):
            raise EOFError

    with pytest.raises(EOFError):
        run_with(plan, Nested())


def test_the_endpoint_of_another_rank_is_refused():
    from commkern._core import ThreadGroup

    group = ThreadGroup(3, 30.0)
    with pytest.raises(ValueError, match=r"rank 0 of 2 .* got rank 1 of 3"):
        run_with(gather_plan(0, 2, 5), group.endpoint(1))
