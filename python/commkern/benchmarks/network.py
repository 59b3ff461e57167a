"""Ranks on two hosts that a slow wire joins: network namespaces and a veth pair.

Half of the ranks leave for a namespace of their own, the other half for another one; a
token bucket (``tc ... tbf``) at both ends of the pair between them sets the rate. The
namespaces have no names: they go when the last process in them ends, however it ends,
so that nothing is left behind. Linux, root, ``ip`` and ``tc`` are needed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from commkern.rank_pool import RankPool
from commkern.rank_worker import Task

_CLONE_NEWNET = 0x40000000
_INTERFACE = "ckwire"
_ADDRESS = "10.77.0.{}/24"
# A larger burst lets messages of its size through at no cost; a smaller one than the
# kernel's timer can refill starves a fast wire.
_BURSTS = ((100, "32kb"), (1000, "256kb"))
_LARGEST_BURST = "1mb"
_OWN_NAMESPACE = "/proc/self/ns/net"


@dataclass(frozen=True)
class Link:
    """A wire of ``mbit`` Mbit/s in each direction."""

    mbit: int

    @property
    def bytes_per_s(self) -> float:
        """Its rate, frames' headers included."""
        return self.mbit * 1e6 / 8

    @property
    def burst(self) -> str:
        """The size of the token bucket, as tc reads it."""
        fits = (burst for mbit, burst in _BURSTS if self.mbit <= mbit)
        return next(fits, _LARGEST_BURST)

    def run(
        self,
        pool: RankPool,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
    ) -> list[Any]:
        """``pool.run`` with this link between the lower and the upper half of the
        ranks."""
        if world_size % 2:
            raise ValueError(f"expected an even world size, got {world_size}")
        task = Task.of(fn, args)
        return pool.run(
            world_size, _behind_link, self, task, timeout_s, timeout_s=timeout_s
        )


@cache
def missing() -> str:
    """Why links cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, this is user {os.geteuid()}"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} of iproute2 not found"
    script = f"ip link add {_INTERFACE} type veth && {_shape(Link(1000))}"
    failed = _sh(script, "unshare", "--net")
    return f"no shaped veth pair: {failed}" if failed else ""


def message_ms(nbytes: int) -> float:
    """The time of one message from rank 0 to the last and back, halved: what the link
    does to a message of this size. Collective; the same on all ranks."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    message, times = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(message, last)
            dist.recv(message, last)
        elif rank == last:
            dist.recv(message, 0)
            dist.send(message, 0)
        times.append(time.perf_counter() - begin)
    best = torch.tensor(min(times), dtype=torch.float64)
    dist.broadcast(best, 0)
    return 500 * float(best)


# --- inside a rank ------------------------------------------------------------------


def _behind_link(
    rank: int, world_size: int, link: Link, task: Task, timeout_s: float
) -> Any:
    """Run a task in a group whose ranks a link separates."""
    host = 2 * rank // world_size
    with _own_network(rank, world_size, host, link):
        # What the group of this host's network gave is used up: a new one, whose
        # sockets are made inside.
        outer = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore("link", outer)  # type: ignore[attr-defined]
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        placed = task.placed(rank, world_size, "link", timeout_s)
        return placed.call()


@contextmanager
def _own_network(rank: int, world_size: int, host: int, link: Link) -> Iterator[None]:
    """This thread, and what it starts, in the network of its host."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(_OWN_NAMESPACE, os.O_RDONLY)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        leaders = (0, world_size // 2)
        if rank in leaders:
            _check(libc.unshare(_CLONE_NEWNET), "unshare")
        pids: list[int] = [0] * world_size
        dist.all_gather_object(pids, os.getpid())
        if rank not in leaders:
            _enter(libc, f"/proc/{pids[leaders[host]]}/ns/net")
        if rank == 0:
            peer = f"peer name {_INTERFACE} netns {pids[leaders[1]]}"
            _run(f"ip link add {_INTERFACE} type veth {peer}")
        dist.barrier()
        if rank in leaders:
            _run(f"ip addr add {_ADDRESS.format(host + 1)} dev {_INTERFACE}")
            _run(f"ip link set lo up && ip link set {_INTERFACE} up")
            _run(_shape(link))
        dist.barrier()
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        _check(libc.setns(before, _CLONE_NEWNET), "setns")
        os.close(before)


def _enter(libc: Any, path: str) -> None:
    there = os.open(path, os.O_RDONLY)
    try:
        _check(libc.setns(there, _CLONE_NEWNET), "setns")
    finally:
        os.close(there)


def _shape(link: Link) -> str:
    rate = f"rate {link.mbit}mbit burst {link.burst} latency 200ms"
    return f"tc qdisc add dev {_INTERFACE} root tbf {rate}"


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _run(script: str) -> None:
    failed = _sh(script)
    if failed:
        raise OSError(f"{script}: {failed}")


def _sh(script: str, *before: str) -> str:
    """Why a script of the shell failed; empty where it did not."""
    command = [*before, "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""
