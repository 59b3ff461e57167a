"""A connection for each direction between two ranks.

gloo has one socket for each pair of ranks, and cannot read from it while it writes to
it: with messages both ways its thread spins on a core that the ranks need. So messages
to lower ranks travel on a gloo group of our own, with the same ranks. It is made when a
group is first used, over that group and the store that the group came from, and closed
with the group. It is no group of torch's (``dist.new_group``): that would have to be
called by all ranks of the world, or take its name from what each rank did before.

Where there is no second one (another backend, no store), the user's group carries both
directions.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commkern.errors import PeerLost
from commkern.failure import lost
from commkern.wire.preamble import PREAMBLE_TAG

_HELLO_TAG = PREAMBLE_TAG + 2
_VERDICT_TAG = PREAMBLE_TAG + 3
_KEY_NBYTES = 16
_BUILD_S = 60.0  # at most: every rank has said hello by then


@dataclass(eq=False)
class Connections:
    """What carries the messages of one group, and what must live as long as it.

    ``downward`` is the group for messages to lower ranks, None where the user's group
    carries them too. ``abandoned`` holds works and buffers that can no longer complete.
    """

    downward: Any = None
    timeout: timedelta | None = None
    abandoned: list[Any] = field(default_factory=list)

    def carrier(self, group: dist.ProcessGroup, sender: int, receiver: int) -> Any:
        """The group whose ``send`` and ``recv`` take a message from here to there."""
        if self.downward is None or sender < receiver:
            return group
        return self.downward

    def wait(self, work: Any) -> None:
        """Wait for a work of either group, at most for the user's time-out."""
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)


_OPEN: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections] = (
    weakref.WeakKeyDictionary()
)


def connections(group: dist.ProcessGroup, step: int) -> Connections:
    """The connections of a group, made at first use; every rank calls it then.

    Raises PeerLost naming a rank that does not call it within the group's time-out, or
    that dies.
    """
    found = _OPEN.get(group)
    if found is None:
        found = _OPEN[group] = Connections()
        if dist.get_world_size(group) > 1:
            _open(group, found, step)
    return found


def _leave_to_parent() -> None:
    """Closing a group in a forked child would wait for threads that are not there."""
    _INHERITED.extend(_OPEN.values())
    _OPEN.clear()


_INHERITED: list[Connections] = []
os.register_at_fork(after_in_child=_leave_to_parent)


def _open(group: dist.ProcessGroup, mine: Connections, step: int) -> None:
    gloo = _gloo(group)
    if gloo is None:
        return
    store = _store(group)
    hello = bytes([store is not None]) + secrets.token_bytes(_KEY_NBYTES)
    hellos = _tell_all(group, hello, _HELLO_TAG, step, mine)
    if not all(hello[0] for hello in hellos):
        return
    timeout: timedelta = gloo.options._timeout
    built, reason = _build(group, store, hellos[0][1:].hex(), timeout)
    verdicts = _tell_all(group, bytes([built is not None]), _VERDICT_TAG, step, mine)
    failed = [rank for rank, verdict in enumerate(verdicts) if not verdict[0]]
    if not failed:
        mine.downward, mine.timeout = built, timeout
        return
    cause = reason or f"rank {failed[0]} could not open its own"
    warnings.warn(
        f"no second connection between the ranks ({cause}); both directions share the "
        "group's, which is slower",
        RuntimeWarning,
        stacklevel=2,
    )


def _tell_all(
    group: dist.ProcessGroup, said: bytes, tag: int, step: int, mine: Connections
) -> list[bytes]:
    """Send a few bytes to every rank; what each rank sent, in rank order."""
    rank = dist.get_rank(group)
    told = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    heard = [torch.zeros_like(told) for _ in range(dist.get_world_size(group))]
    heard[rank] = told
    works: list[tuple[int, Any]] = []
    held = [told, heard, works]
    mine.abandoned.append(held)
    unreachable: PeerLost | None = None
    for peer, box in enumerate(heard):
        if peer == rank:
            continue
        try:
            works.append((peer, group.recv([box], peer, tag)))
            works.append((peer, group.send([told], peer, tag)))
        except RuntimeError as error:  # but the others have to hear of us
            unreachable = unreachable or lost(peer, step, error)
    if unreachable is not None:
        raise unreachable
    for peer, work in works:
        _wait(work, peer, step)
    held.clear()
    return [box.numpy().tobytes() for box in heard]


def _wait(work: Any, peer: int, step: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(peer, step, error) from error


def _build(
    group: dist.ProcessGroup, store: Any, key: str, timeout: timedelta
) -> tuple[Any, str]:
    """The second group; or None, and why not."""
    # Whoever fails tells the others, and they still wait then.
    limit = min(timeout / 2, timedelta(seconds=_BUILD_S))
    try:
        client = _own_client(store, limit)
        own = dist.PrefixStore(f"commkern/{key}", client)  # type: ignore[attr-defined]
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        return dist.ProcessGroupGloo(own, rank, world_size, limit), ""
    except RuntimeError as error:
        return None, str(error)


def _own_client(store: Any, timeout: timedelta) -> Any:
    """The store through a connection of our own, if it has any: a wait of another
    thread occupies the user's, and may be for a rank that waits for us."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return store
    return dist.TCPStore(  # type: ignore[attr-defined]
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout
    )


def _gloo(group: dist.ProcessGroup) -> Any:
    """The gloo backend that carries the group's CPU tensors, or None."""
    if not dist.is_gloo_available():
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for the CPU
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _store(group: dist.ProcessGroup) -> Any:
    """The store that the group came from, or None."""
    if hasattr(group, "get_group_store"):
        with contextlib.suppress(RuntimeError):
            return group.get_group_store()
    with contextlib.suppress(AttributeError, KeyError):  # torch below 2.6 or so
        return distributed_c10d._get_process_group_store(group)
    return None
