"""Ranks as threads of one process, in pure Python: what the compiled ``ThreadGroup`` is
for the compiled runner, and of use with either."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commkern.arrays import Bytes, as_bytes
from commkern.failure import Failure
from commkern.plan import Plan, Slice
from commkern.wire.preamble import NBYTES


@dataclass
class _Offer:
    preamble: bytes
    pieces: list[Bytes]
    withdrawn: bool = False


class LocalGroup:
    """A group of ``world_size`` ranks that are threads of this process.

    A rank waits at most ``timeout_s`` seconds in one round. The first failure poisons
    the group: exchanges that cannot complete raise it, and so do all later ones.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {world_size}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected seconds above 0, got {timeout_s}")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()  # guards what follows
        self.failure: Failure | None = None
        self._mailboxes: dict[tuple[int, int], dict[int, _Offer]] = {}

    def endpoint(self, rank: int) -> LocalEndpoint:
        """The group as ``rank`` sees it; for one thread at a time."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: expected 0 ... {self.world_size - 1}, got {rank}")
        return LocalEndpoint(self, rank)

    def mailbox(self, sender: int, receiver: int) -> dict[int, _Offer]:
        """What one rank offers another, by round."""
        return self._mailboxes.setdefault((sender, receiver), {})

    def poison(self, failure: Failure) -> None:
        """Keep the first failure, and wake everybody."""
        self.failure = self.failure or failure
        self.changed.notify_all()


class LocalEndpoint:
    """One rank of a `LocalGroup`: the ``transport`` of a `GroupWorker`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.world_size = group.world_size
        self.bytes_sent = 0
        self.aborted = False

    def bind(self, plan: Plan, buffers: Mapping[str, Any], step: int) -> LocalRun:
        """The transport of one run of a plan over "data" and the workspace."""
        return LocalRun(self, plan, buffers)

    def abort(self, error: BaseException) -> None:
        """This rank stops: peers that wait for it raise PeerFailed at once."""
        group = self.group
        with group.changed:
            self.aborted = True
            text = f"{type(error).__name__}: {error}"
            group.poison(Failure("failed", self.rank, self.rank, text))
            for peer in range(self.world_size):
                for offer in group.mailbox(self.rank, peer).values():
                    offer.withdrawn = True


class LocalRun:
    """``post`` and ``complete`` of one run of one plan, as the runner calls them."""

    def __init__(
        self, endpoint: LocalEndpoint, plan: Plan, buffers: Mapping[str, Any]
    ) -> None:
        self._endpoint = endpoint
        self._group = endpoint.group
        self._plan = plan
        self._buffers = buffers

    def post(self, number: int) -> None:
        """Offer this rank's messages of a round. Does not wait."""
        rank = self._endpoint.rank
        with self._group.changed:
            if self._endpoint.aborted:
                self._raise_failure()
            for transfer in self._plan.exchanges[number].sends:
                peer = transfer.peer
                preamble = self._preamble("preambles_out", number, peer).tobytes()
                offer = _Offer(preamble, [self._view(p) for p in transfer.pieces])
                self._group.mailbox(rank, peer)[number] = offer
                self._endpoint.bytes_sent += NBYTES + transfer.nbytes
            self._group.changed.notify_all()

    def complete(self, number: int) -> None:
        """Copy what peers offer, then wait until they have copied ours."""
        exchange = self._plan.exchanges[number]
        deadline = time.monotonic() + self._group.timeout_s
        missing = list(exchange.receives)
        with self._group.changed:
            while missing:
                # Look at all that has come: a mismatch of our own is the best cause.
                left = [t for t in missing if not self._take(number, *t)]
                if len(left) == len(missing):
                    self._wait(deadline, left[0].peer)
                missing = left
            for peer, _ in exchange.sends:
                mailbox = self._group.mailbox(self._endpoint.rank, peer)
                while number in mailbox:
                    self._wait(deadline, peer)

    def abort(self, error: BaseException) -> None:
        """As the endpoint's."""
        self._endpoint.abort(error)

    def _take(self, number: int, peer: int, pieces: tuple[Slice, ...]) -> bool:
        rank = self._endpoint.rank
        mailbox = self._group.mailbox(peer, rank)
        offer = mailbox.get(number)
        if offer is None:
            return False
        expected = self._preamble("preambles_expected", number, peer).tobytes()
        if offer.preamble != expected:
            text = f"rank {peer} does not match rank {rank}"
            failure = Failure("mismatch", peer, rank, text, offer.preamble, expected)
            self._group.poison(failure)
            raise failure
        if offer.withdrawn:
            return False
        self._preamble("preambles_in", number, peer)[:] = bytearray(offer.preamble)
        for piece, sent in zip(pieces, offer.pieces, strict=True):
            self._view(piece)[:] = sent
        del mailbox[number]
        self._group.changed.notify_all()
        return True

    def _wait(self, deadline: float, peer: int) -> None:
        if self._group.failure is not None:
            self._raise_failure()
        left = deadline - time.monotonic()
        if left <= 0:
            text = f"rank {peer} did not answer within the time-out"
            self._group.poison(Failure("lost", peer, self._endpoint.rank, text))
            self._raise_failure()
        self._group.changed.wait(left)

    def _raise_failure(self) -> None:
        found = self._group.failure
        assert found is not None
        raise Failure(
            found.kind,
            found.peer,
            found.observer,
            found.text,
            found.received,
            found.expected,
        )

    def _view(self, piece: Slice) -> Bytes:
        whole = as_bytes(self._buffers[piece.buffer])
        return whole[piece.offset : piece.offset + piece.nbytes]

    def _preamble(self, buffer: str, number: int, peer: int) -> Bytes:
        return self._view(self._plan.preamble_place(buffer, number, peer))
