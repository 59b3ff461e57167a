"""Messages to lower ranks travel on a gloo group of our own: how it comes to be, what
happens when it cannot, and that it goes with the user's group."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ports import free_port

import commkern as ck
from commkern import connections, rendezvous
from commkern.groups import worker
from commkern.testing import Died


def downward(group=None):
    return connections._OPEN[group or dist.group.WORLD].downward


def reduces(group=None):
    """Whether an all_reduce over the group gives the sum of (rank + 1)."""
    size = dist.get_world_size(group)
    tensor = torch.full((2000,), dist.get_rank(group) + 1.0)
    ck.all_reduce(tensor, group=group)
    return torch.equal(tensor, torch.full((2000,), size * (size + 1) / 2))


class Recorder:
    def __init__(self, group):
        self.group, self.calls = group, []

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer))
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer))
        return self.group.recv(tensors, peer, tag)


def directions(rank, world_size):
    assert reduces()
    own = connections._OPEN[dist.group.WORLD]
    own.downward = recorder = Recorder(own.downward)
    assert reduces()
    return recorder.calls


def test_messages_to_lower_ranks_have_their_own_connection(ranks):
    for rank, calls in enumerate(ranks.run(3, directions)):
        # Two rounds, each with a preamble and a body.
        expected = [("send", peer) for peer in range(rank)] * 4
        expected += [("recv", peer) for peer in range(rank + 1, 3)] * 4
        assert sorted(calls) == sorted(expected)


# --- groups of every kind -----------------------------------------------------------


def groups_of_every_origin(rank, world_size, ports, path):
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    fits = {"rank": rank, "world_size": world_size}
    origins = [
        {"init_method": "env://"},
        {"init_method": f"tcp://127.0.0.1:{ports[1]}"},
        {"init_method": f"file://{path}/init"},
        {"store": dist.FileStore(f"{path}/store", world_size)},
    ]
    for origin in origins:
        dist.init_process_group("gloo", **origin, **fits)
        for group in (None, dist.new_group([0, 2]), dist.new_group([0, 1, 2])):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                assert reduces(group), origin
                assert downward(group) is not None, origin
        dist.barrier()
        dist.destroy_process_group()
    return True


def test_every_way_to_make_a_group(ranks, tmp_path):
    ports = [free_port(), free_port()]
    assert all(ranks.run(3, groups_of_every_origin, ports, str(tmp_path)))


def under_debug(rank, world_size):
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group([0, 1])
    dist.set_debug_level(before)
    assert reduces(group)
    return downward(group) is not None


def test_a_group_in_debug_mode(ranks):
    assert ranks.run(2, under_debug) == [True, True]


def two_groups_at_once(rank, world_size):
    groups = [None, dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])]
    groups = groups[rank:] + groups[:rank]  # another order on every rank
    tensors = [torch.full((2000,), rank + 1.0) for _ in groups]
    works = [
        ck.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(tensors, groups, strict=True)
    ]
    assert all(work.wait() for work in works)
    assert all(torch.equal(t, torch.full((2000,), 6.0)) for t in tensors)
    return len({id(downward(group)) for group in groups})


def test_first_calls_of_several_groups_at_the_same_time(ranks):
    assert ranks.run(3, two_groups_at_once) == [3, 3, 3]


def beside_new_group(rank, world_size):
    """Rank 0 waits in the store for rank 1, which waits for the result first."""
    tensor = torch.ones(2000)
    if rank == 0:
        time.sleep(0.5)  # so that rank 1 waits for us, too
    work = ck.all_reduce(tensor, async_op=True)
    if rank == 1:
        work.wait()
    group = dist.new_group([0, 1])
    work.wait()
    return downward() is not None and reduces(group)


def test_a_wait_in_the_users_store_holds_nothing_up(ranks):
    assert ranks.run(2, beside_new_group, group_timeout_s=20) == [True, True]


# --- where there is none ------------------------------------------------------------


def refuse(*_):
    raise RuntimeError("refused on purpose")


def build_in_vain(builder, run=rendezvous.Builder.run):
    run(builder)
    assert builder.state == rendezvous.DONE
    builder.reason, builder.state = "refused on purpose", rendezvous.FAILED


WITHOUT = {
    "gloo": (connections, "_gloo", lambda group: None),
    "early": (rendezvous.Mailbox, "set", refuse),
    "late": (rendezvous.Builder, "run", build_in_vain),
}


def without(rank, world_size, what):
    """No gloo on any rank, or a failure on rank 1."""
    replaced = what == "gloo" or rank == 1
    patch = mock.patch.object(*WITHOUT[what])
    with (
        patch if replaced else contextlib.nullcontext(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        assert reduces()
        assert reduces()
    assert downward() is None
    return [str(warning.message) for warning in caught]


def test_without_gloo_one_connection_serves_both(ranks):
    assert ranks.run(3, without, "gloo") == [[], [], []]


@pytest.mark.parametrize("what", ["early", "late"])
def test_where_one_rank_cannot_open_its_own_all_go_on_with_a_warning(ranks, what):
    texts = ranks.run(3, without, what)
    for rank, (text,) in enumerate(texts):
        assert "no second connection" in text
        assert ("on purpose" in text) == (rank == 1)


# --- ranks that do not come, or die -------------------------------------------------


def one_is_missing(rank, world_size):
    if rank == 1:
        return None
    with pytest.raises(ck.PeerLost) as caught:
        ck.all_reduce(torch.ones(1000))
    with pytest.raises(ck.PeerLost):  # the group is spent
        ck.all_reduce(torch.ones(1000))
    return caught.value.rank


def test_a_rank_that_never_calls_is_named_by_all(ranks):
    assert ranks.run(3, one_is_missing, group_timeout_s=5) == [1, None, 1]


def die(*_):
    os._exit(3)


DIES = {
    "before": (connections, "_gloo"),
    "while it opens": (rendezvous.Mailbox, "set"),
    "as it begins to open": (rendezvous.Builder, "run"),
}


def dies(rank, world_size, at):
    """Rank 1 dies in its first call, before or while it opens its connections."""
    if rank == 1:
        with mock.patch.object(*DIES[at], die):
            ck.all_reduce(torch.ones(1000))
    started = time.monotonic()
    with pytest.raises(ck.PeerLost) as caught:
        ck.all_reduce(torch.ones(1000))
    assert time.monotonic() - started < 20  # far below the time-out
    return caught.value.rank


@pytest.mark.parametrize("at", DIES)
def test_a_rank_that_dies_in_its_first_call_is_named(ranks, at):
    results = ranks.run(3, dies, at, group_timeout_s=50, expect_death=(1,))
    assert isinstance(results[1], Died)
    assert [results[0], results[2]] == [1, 1]


def interrupted(rank, world_size):
    def interrupt(*_):
        raise KeyboardInterrupt

    if rank == 1:
        with pytest.raises(ck.PeerFailed, match="rank 0 gave up in step 0") as told:
            ck.all_reduce(torch.ones(1000))
        return type(told.value).__name__
    with (
        mock.patch.object(rendezvous.Mailbox, "collect", interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ck.all_reduce(torch.ones(1000))
    with pytest.raises(ck.CommkernError, match="KeyboardInterrupt") as caught:
        ck.all_reduce(torch.ones(1000))
    return type(caught.value).__name__


def test_an_interrupt_while_connections_open_spends_the_group(ranks):
    names = ranks.run(2, interrupted, group_timeout_s=60, timeout_s=30)
    assert names == ["CommkernError", "PeerFailed"]


def destroyed(rank, world_size):
    """Rank 0 destroys the group while connections open on the worker's thread."""
    group = dist.new_group([0, 1])
    opening, gone = threading.Event(), threading.Event()
    tell_all = rendezvous.tell_all

    def telling(*args):
        told = tell_all(*args)
        if rank == 0:
            opening.set()
            assert gone.wait(20)
        return told

    tensors = [torch.full((2000,), rank + 1.0) for _ in range(2)]
    with mock.patch.object(rendezvous, "tell_all", telling):
        work = ck.all_reduce(tensors[0], group=group, async_op=True)
        if rank == 0:
            assert opening.wait(20)
            dist.destroy_process_group(group)
            gone.set()
        work.wait()
    ck.all_reduce(tensors[1], group=group)
    return all(torch.equal(t, torch.full((2000,), 3.0)) for t in tensors)


def test_a_group_that_is_destroyed_while_connections_open(ranks):
    assert ranks.run(2, destroyed, group_timeout_s=15, timeout_s=60) == [True, True]


def goes_on_without(rank, world_size, name):
    assert reduces()
    if rank == 2:
        os._exit(3)
    with pytest.raises(ck.PeerLost):
        ck.all_reduce(torch.ones(100_000))
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    dist.destroy_process_group()
    again = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    return reduces() and downward() is not None


def test_a_new_group_after_a_rank_was_lost(ranks):
    name = uuid.uuid4().hex
    results = ranks.run(3, goes_on_without, name, group_timeout_s=20, expect_death=(2,))
    assert results[:2] == [True, True]


# --- lifetime -----------------------------------------------------------------------


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def closes(rank, world_size, fails):
    """Open files before a group, with it, after first use, and after its end."""

    def use():
        group = dist.new_group([0, 1])
        counts.append(open_files())
        assert reduces(group)
        counts.append(open_files())
        with pytest.raises(ck.MismatchError) if fails else contextlib.nullcontext():
            ck.all_reduce(torch.ones(1000 + rank * fails), group=group)
        used = worker(group)  # as a state holds it
        dist.destroy_process_group(group)
        return used

    counts = [open_files()]
    kept = use()
    counts.append(open_files())
    return counts, kept.world_size


@pytest.mark.parametrize("fails", [False, True])
def test_the_connection_closes_with_the_users_group(ranks, fails):
    for (before, made, used, after), _ in ranks.run(2, closes, fails):
        assert before == after
        assert before < made < used


def forks(rank, world_size):
    assert reduces()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0 if not connections._OPEN else 1)
    deadline = time.monotonic() + 30
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert reduces()
    return bool(ended), os.waitstatus_to_exitcode(status)


def test_a_forked_child_ends(ranks):
    assert ranks.run(2, forks) == [(True, 0), (True, 0)]


EXIT = """
import os, sys
import torch
import torch.distributed as dist
from tests.ports import free_port
import commkern as ck

path, rank, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
ck.all_reduce(torch.ones(2000))
if end == "lost":
    if rank == 1:
        os._exit(0)
    try:
        ck.all_reduce(torch.ones(2000))
    except ck.PeerLost:
        pass
if end == "destroyed":
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("end", ["running", "destroyed", "lost"])
def test_the_interpreter_exits(tmp_path, end):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(tmp_path / "store"), str(rank), end],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(started):
        with process:
            try:
                out, err = process.communicate(timeout=40)
            finally:
                process.kill()
        assert process.returncode == 0, err
        assert out == ("" if end == "lost" and rank else "done\n")
