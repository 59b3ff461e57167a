"""The pool of rank processes and the thread runner that other tests stand on."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from commkern.testing import (
    Died,
    RankDied,
    RankPool,
    RankTimeout,
    RankTraceback,
    send_message,
    spawn_threads,
)


@dataclass(frozen=True)
class Box:
    value: int


class StubbornError(Exception):
    """Does not survive pickling."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def summed(rank, world_size, start):
    t = torch.full((3,), float(rank + start))
    dist.all_reduce(t)
    return rank, world_size, t.tolist()


def boxed(rank, _world_size, box):
    return Box(box.value + rank)


def process_id(_rank, _world_size):
    return os.getpid()


def intra_op_threads(_rank, _world_size):
    return torch.get_num_threads()


def fails(rank, _world_size):
    if rank == 1:
        raise ValueError("expected 3, got 4")
    dist.barrier()


def fails_stubbornly(_rank, _world_size):
    raise StubbornError(1, 2)


def dies(rank, _world_size, how):
    if rank == 1:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    return "alive"


def hangs(rank, _world_size):
    if rank == 1:
        send_message(os.getpid())
        time.sleep(60)


def waits_for_peer(rank, _world_size):
    if rank == 1:
        return "sent nothing"
    with pytest.raises(RuntimeError):
        dist.recv(torch.zeros(1), src=1)
    return "timed out"


def starts_late(rank, _world_size, seconds):
    """Rank 1 will do so in the next run."""
    if rank == 0:
        return
    plain = dist.PrefixStore

    def late(*args):
        dist.PrefixStore = plain
        time.sleep(seconds)
        return plain(*args)

    dist.PrefixStore = late


def reports(rank, _world_size):
    for i in range(3):
        send_message((rank, i))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_come_in_rank_order(ranks, world_size):
    total = [float(sum(range(10, 10 + world_size)))] * 3
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert ranks.run(world_size, summed, 10) == expected


def test_processes_stay_alive_between_runs(ranks):
    assert ranks.run(2, process_id) == ranks.run(2, process_id)
    assert ranks.run(3, process_id)[:2] == ranks.run(2, process_id)


def test_objects_of_the_test_module_travel(ranks):
    assert ranks.run(2, boxed, Box(5)) == [Box(5), Box(6)]


def test_ranks_have_one_thread(ranks):
    assert ranks.run(2, intra_op_threads) == [1, 1]


def test_an_exception_comes_back_as_itself(ranks):
    with pytest.raises(ValueError, match="expected 3, got 4") as caught:
        ranks.run(2, fails)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 1
    assert "in fails" in str(cause)


def test_an_exception_that_cannot_be_pickled_keeps_its_text(ranks):
    with pytest.raises(RuntimeError, match="StubbornError: 1 and 2"):
        ranks.run(1, fails_stubbornly)


@pytest.mark.parametrize(("how", "code"), [("signal", -9), ("exit", 7)])
def test_an_expected_death_is_a_result(ranks, how, code):
    assert ranks.run(2, dies, how, expect_death=[1]) == ["alive", Died(code)]


@pytest.mark.parametrize(("how", "text"), [("signal", "SIGKILL"), ("exit", "code 7")])
def test_an_unexpected_death_is_an_error(ranks, how, text):
    with pytest.raises(RankDied, match=f"rank 1 died .*{text}"):
        ranks.run(2, dies, how)
    assert ranks.run(2, summed, 0)[1] == (1, 2, [1.0] * 3)


def test_a_rank_that_should_have_died_is_an_error(ranks):
    with pytest.raises(RankDied, match="rank 0 was expected to die"):
        ranks.run(1, process_id, expect_death=[0])


@pytest.mark.parametrize("stopped", [False, True], ids=["asleep", "stopped"])
def test_a_hanging_rank_is_killed_and_its_stack_shown(ranks, stopped):
    """Also that of one which takes a second and a half to answer."""
    ranks.run(2, process_id)  # starting them takes longer than what follows

    timers = []

    def stop(_rank, process):
        if stopped:
            os.kill(process, signal.SIGSTOP)
            timers.append(threading.Timer(6.5, os.kill, (process, signal.SIGCONT)))
            timers[0].start()

    start = time.monotonic()
    with pytest.raises(RankTimeout, match="in hangs") as caught:
        ranks.run(2, hangs, timeout_s=5, on_message=stop)
    for timer in timers:
        timer.cancel()
    assert "ranks [1] of 2" in str(caught.value)
    assert time.monotonic() - start < 20
    assert len(ranks.run(2, process_id)) == 2


def test_the_group_has_the_time_out_of_the_run(ranks):
    results = ranks.run(2, waits_for_peer, group_timeout_s=3)
    assert results == ["timed out", "sent nothing"]


def test_a_late_start_is_no_matter_of_the_groups_time_out(ranks):
    ranks.run(2, starts_late, 4.0)
    assert ranks.run(2, summed, 0, group_timeout_s=3)[1] == (1, 2, [1.0] * 3)


def test_messages_arrive_while_running(ranks):
    got = []
    ranks.run(2, reports, on_message=lambda rank, value: got.append((rank, value)))
    assert sorted(got) == [(rank, (rank, i)) for rank in range(2) for i in range(3)]


def test_only_module_level_functions(ranks):
    with pytest.raises(TypeError, match="module-level function"):
        ranks.run(1, lambda rank, world_size: None)


def test_bad_arguments_name_both_values(ranks):
    with pytest.raises(ValueError, match=r"below the world size 2.*\[2\]"):
        ranks.run(2, process_id, expect_death=[2])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ranks.run(0, process_id)


def test_nothing_is_left_over_from_an_interrupted_run(ranks, monkeypatch):
    def interrupted(_pool, members):
        for process in members:
            process.send(None)
        raise KeyboardInterrupt

    monkeypatch.setattr(RankPool, "_release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(2, process_id)
    monkeypatch.undo()
    assert ranks.run(2, boxed, Box(5)) == [Box(5), Box(6)]


def test_close_ends_every_process():
    with RankPool() as pool:
        processes = pool.run(2, process_id)
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


# A signal that arrives in the moment before a wait begins does not interrupt it; nor
# does one that another thread of the process takes.
@pytest.mark.parametrize("blocked", ["[]", "[signal.SIGINT]"], ids=["at once", "late"])
def test_nothing_is_left_after_ctrl_c(tmp_path, blocked):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, threading, time\n"
        "from commkern.testing import RankPool, send_message\n"
        "def work(rank, world_size):\n"
        "    send_message(os.getpid())\n"
        "    time.sleep(60)\n"
        "def show(rank, value):\n"
        f"    signal.pthread_sigmask(signal.SIG_BLOCK, {blocked})\n"
        "    print(value, flush=True)\n"
        # A job in the background of a shell inherits that it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    with RankPool() as pool:\n"
        "        pool.run(2, work, on_message=show)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout is not None
            workers = [int(process.stdout.readline()) for _ in range(2)]
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(20) != 0
        finally:
            process.kill()
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_threads_return_in_rank_order():
    barrier = threading.Barrier(4)

    def run(rank):
        barrier.wait(10)
        return rank * rank

    assert spawn_threads(4, run) == [0, 1, 4, 9]


def test_threads_raise_the_first_exception():
    failing = queue.SimpleQueue()

    def run(rank):
        if rank == 2:
            for _ in range(2):
                failing.put(threading.current_thread())
            raise KeyError("first")
        failing.get(timeout=10).join(10)
        raise ValueError("later")

    with pytest.raises(KeyError, match="first"):
        spawn_threads(3, run)


def test_threads_that_hang_are_named():
    release = threading.Event()

    def waits_here(rank):
        if rank == 1:
            release.wait(30)

    with pytest.raises(RankTimeout, match=r"rank 1 were not done[\s\S]*waits_here"):
        spawn_threads(2, waits_here, timeout_s=1)
    release.set()
