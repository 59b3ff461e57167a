"""How a second gloo group of the same ranks comes to be.

gloo's ranks find each other by a store. The user's may be gone by now, its server slow,
or its client taken by a wait of another thread, for a rank that waits for us. So gloo
gets a store whose entries are exchanged over the user's group: point-to-point, in
rounds in which every rank tells every other, until each of them is done or has failed.
A rank that dies meanwhile is seen at once.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commkern.agreement import gave_up
from commkern.errors import CommkernError, PeerLost
from commkern.failure import lost
from commkern.wire.preamble import PREAMBLE_TAG

_SIZE_TAG = PREAMBLE_TAG + 2
_BODY_TAG = PREAMBLE_TAG + 3
_SIZE = struct.Struct("<Q")
_GAVE_UP = 1 << 63  # with the step, in the place of a size
_ENTRY = struct.Struct("<II")
_PAUSE_S = 0.005
BUSY, DONE, FAILED = range(3)


class Mailbox(dist.Store):  # type: ignore[name-defined,misc]
    """A store for one group of gloo's. ``set``, ``get``, ``wait`` and ``check`` are
    called by gloo in a thread of its own; the rest by the rounds."""

    def __init__(self, limit: timedelta) -> None:
        super().__init__()
        self._limit_s = limit.total_seconds()
        self._entries: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = self._unsent[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self.check(keys), self._limit_s
            )
            if not self.check(keys):
                raise CommkernError(f"no rank has said {keys}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def close(self) -> None:
        """End every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def collect(self) -> bytes:
        """What has been set since the last time; waits a little for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent, _PAUSE_S)
            entries, self._unsent = self._unsent, {}
        return _packed(entries)

    def deliver(self, packed: bytes) -> None:
        """Add what another rank has set."""
        with self._changed:
            self._entries |= _unpacked(packed)
            self._changed.notify_all()


def _packed(entries: Mapping[str, bytes]) -> bytes:
    pieces = []
    for key, value in entries.items():
        name = key.encode()
        pieces += [_ENTRY.pack(len(name), len(value)), name, value]
    return b"".join(pieces)


def _unpacked(packed: bytes) -> dict[str, bytes]:
    entries, at = {}, 0
    while at < len(packed):
        name_nbytes, nbytes = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        name = packed[at : at + name_nbytes].decode()
        at += name_nbytes
        entries[name] = packed[at : at + nbytes]
        at += nbytes
    return entries


class Builder(threading.Thread):
    """Builds a gloo group over a mailbox, which only a thread of its own can: gloo
    waits for connections that other ranks open after a later round."""

    def __init__(self, rank: int, world_size: int, limit: timedelta) -> None:
        super().__init__(name="commkern-rendezvous")
        self.box = Mailbox(limit)
        self.state = BUSY
        self.group: Any = None
        self.reason = ""
        self._arguments = (rank, world_size, limit)

    def run(self) -> None:
        try:
            self.group = dist.ProcessGroupGloo(self.box, *self._arguments)
            self.state = DONE
        except Exception as error:  # noqa: BLE001 - told to all ranks
            self.reason = str(error)
            self.state = FAILED


def second_group(
    group: dist.ProcessGroup, limit: timedelta, step: int, held: list[Any]
) -> Builder:
    """Build another gloo group of the ranks of ``group``; all of them call this.

    Returns once every rank's part is ``DONE`` or ``FAILED``, and ``FAILED`` on all if
    on any. gloo waits no longer than ``limit``, once all ranks have called. Raises
    PeerLost for a rank that does not call within the group's time-out, or dies, and
    PeerFailed for one that calls `give_up`; what messages that cannot complete then use
    is left in ``held``.
    """
    tell_all(group, b"", step, held)
    builder = Builder(group.rank(), group.size(), limit)
    builder.start()
    try:
        while True:
            state = bytes([builder.state])  # first: once done, nothing more is set
            heard = tell_all(group, state + builder.box.collect(), step, held)
            states = {message[0] for message in heard}
            if FAILED in states:
                builder.box.close()
            if BUSY not in states:
                break
            for message in heard:
                builder.box.deliver(message[1:])
    except BaseException:
        builder.box.close()
        raise
    if FAILED in states:
        builder.state, builder.group = FAILED, None
    return builder


def tell_all(
    group: dist.ProcessGroup, said: bytes, step: int, held: list[Any]
) -> list[bytes]:
    """Send some bytes to every rank; what each rank sent, in rank order."""
    sizes = [_SIZE.size] * group.size()
    size = _SIZE.pack(len(said))
    told = _exchange(group, size, sizes, _SIZE_TAG, step, held)
    sizes = [_SIZE.unpack(size)[0] for size in told]
    for peer, nbytes in enumerate(sizes):
        if nbytes & _GAVE_UP:
            raise gave_up(peer, nbytes ^ _GAVE_UP, f"an error on rank {peer}")
    return _exchange(group, said, sizes, _BODY_TAG, step, held)


def give_up(group: dist.ProcessGroup, step: int, held: list[Any]) -> None:
    """Tell every rank that waits for this one in a round that it failed, in ``step``,
    and take what they say in that round, or they would wait for that.

    Does not wait; what the messages use is left in ``held``.
    """
    said = _SIZE.pack(_GAVE_UP | step)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        sent, received = (
            torch.frombuffer(bytearray(said), dtype=torch.uint8) for _ in range(2)
        )
        works: list[Any] = []
        held.append((works, sent, received))
        with contextlib.suppress(RuntimeError):  # that rank is gone
            works.append(group.send([sent], peer, _SIZE_TAG))
            works.append(group.recv([received], peer, _SIZE_TAG))


def _exchange(
    group: dist.ProcessGroup,
    said: bytes,
    sizes: list[int],
    tag: int,
    step: int,
    held: list[Any],
) -> list[bytes]:
    """One message to every rank, and from each one of the size that is known."""
    rank = group.rank()
    told = torch.frombuffer(bytearray(said or b"\0"), dtype=torch.uint8)[: len(said)]
    heard = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    heard[rank] = told
    works: list[tuple[int, Any]] = []
    pending = [told, heard, works]
    held.append(pending)
    unreachable: PeerLost | None = None
    for peer, received in enumerate(heard):
        if peer == rank:
            continue
        try:
            works.append((peer, group.recv([received], peer, tag)))
            works.append((peer, group.send([told], peer, tag)))
        except RuntimeError as error:  # but the others have to hear of us
            unreachable = unreachable or lost(peer, step, error)
    if unreachable is not None:
        raise unreachable
    for peer, work in works:
        _wait(work, peer, step)
    held.remove(pending)
    return [received.numpy().tobytes() for received in heard]


def _wait(work: Any, peer: int, step: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(peer, step, error) from error
