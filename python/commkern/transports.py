"""The process-group transport: a plan's messages over torch.distributed.

Point-to-point in a reserved tag range, which runs beside the user's collectives: on the
user's own group and, where that is gloo's, a second one (see `connections`). Every
message goes with a 64-byte preamble on a constant tag; the message's own tag follows
from what the ranks must agree on, so that messages of calls that do not match never
meet.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from commkern.agreement import explain
from commkern.connections import connections, give_up
from commkern.errors import CommkernError, MismatchError, PeerLost
from commkern.failure import lost
from commkern.plan import Plan, Slice
from commkern.wire import preamble as wire
from commkern.workspace import Movable

_TEXT_TAG = wire.PREAMBLE_TAG + 1
_TEXT_NBYTES = 16384
_body_tag = functools.lru_cache(256)(wire.body_tag)  # by the plan's preamble


_Works = list[tuple[int, Any]]  # peer and work


@dataclass
class _Posted:
    """The works of a round that are yet to be waited for, in that order.

    gloo waits for ever for a work that it has been waited for before. ``matching`` are
    the peers whose preamble has come and is the expected one.
    """

    preambles: _Works = field(default_factory=list)
    pieces: _Works = field(default_factory=list)
    sends: _Works = field(default_factory=list)
    matching: set[int] = field(default_factory=set)


class ProcessGroupTransport:
    """Runs the exchanges of any plan over one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.bytes_sent = 0
        self.gave_up = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; CommkernError once it has been destroyed."""
        group = self._group()
        if group is None:
            raise CommkernError(
                "the process group was destroyed; a state goes on in a new one with "
                "state.rejoin(group)"
            )
        return group

    def bind(self, plan: Plan, buffers: Movable, step: int) -> _BoundTransport:
        """The transport of one run of a plan over "data" and workspace, as bytes."""
        bound = _BoundTransport(self, plan, buffers, step)
        try:
            bound.post_receives()
        except BaseException as error:
            bound.abort(error)
            raise
        return bound

    def give_up(self, error: BaseException, step: int) -> None:
        """Tell all ranks that this one failed, unless a run has: whatever they wait for
        next from it ends with PeerFailed. Does not wait."""
        if not self.gave_up:
            self.gave_up = True
            give_up(self.group, step, self.error_preamble(step))

    def error_preamble(self, step: int) -> torch.Tensor:
        """What a rank that failed sends before a call of which it knows nothing."""
        mine = wire.Preamble(self.rank, self.world_size, step)
        return _as_tensor(wire.error_preamble(mine))


class EndpointTransport:
    """A rank of a group of threads, held weakly like a process group."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = weakref.ref(endpoint)
        self.rank: int = endpoint.rank
        self.world_size: int = endpoint.world_size

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        sent: int = self._alive().bytes_sent
        return sent

    def bind(self, plan: Plan, buffers: Movable, step: int) -> Any:
        """The transport of one run of a plan over "data" and workspace, as bytes."""
        return self._alive().bind(plan, buffers, step)

    def give_up(self, error: BaseException, step: int) -> None:
        """As of `ProcessGroupTransport`; for endpoints that can abort."""
        abort = getattr(self._alive(), "abort", None)
        if abort is not None:
            abort(error)

    def _alive(self) -> Any:
        endpoint = self._endpoint()
        if endpoint is None:
            raise CommkernError("the endpoint of this transport is gone")
        return endpoint


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class _BoundTransport:
    """``post`` and ``complete`` of one run, as the runner calls them."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        plan: Plan,
        buffers: Movable,
        step: int,
    ) -> None:
        self._transport = transport
        self._connections = connections(transport.group, step)
        self._plan = plan
        self._buffers = buffers
        self._step = step
        self._next_round = 0  # the first that has not been posted to every peer
        self._reached: set[int] = set()  # the peers that it has been posted to
        self._tag = _body_tag(plan.preamble)
        self._failure: PeerLost | None = None
        self._lost: set[int] = set()  # peers, as far as this run has found out
        self._silent: set[int] = set()  # peers that send no bodies that match
        self._posted = [_Posted() for _ in plan.exchanges]

    def post_receives(self) -> None:
        """All at once and early: gloo sends at once where the receiver is known to be
        ready, and otherwise asks first."""
        for number, exchange in enumerate(self._plan.exchanges):
            for peer, pieces in exchange.receives:
                self._post_receive(number, peer, pieces)

    def post(self, number: int) -> None:
        """Start every send of a round; the receives are under way since the start."""
        if self._failure is not None:
            raise self._failure
        posted = self._posted[number]
        # Peer by peer, so that a failure can be blamed on one.
        for peer, pieces in self._plan.exchanges[number].sends:
            head = self._preamble("preambles_out", number, peer)
            posted.sends.append((peer, self._send(head, peer, wire.PREAMBLE_TAG)))
            for piece in pieces:
                work = self._send(self._view(piece), peer, self._tag)
                posted.sends.append((peer, work))
            self._reached.add(peer)
        self._next_round = number + 1
        self._reached.clear()

    def _post_receive(self, number: int, peer: int, pieces: tuple[Slice, ...]) -> None:
        posted = self._posted[number]
        head = self._preamble("preambles_in", number, peer)
        try:
            work = self._receive(head, peer, wire.PREAMBLE_TAG)
            posted.preambles.append((peer, work))
            for piece in pieces:
                work = self._receive(self._view(piece), peer, self._tag)
                posted.pieces.append((peer, work))
        except PeerLost as error:
            self._failure = self._failure or error

    def complete(self, number: int) -> None:
        """Wait for a round: preambles first, and bodies only where they match."""
        posted = self._posted[number]
        self._check_preambles(number)
        self._wait_for_all(posted.pieces)
        self._wait_for_all(posted.sends)

    def abort(self, error: BaseException) -> None:
        """Send an error preamble in the place of the next one, of this call or, where
        a peer has all of this call's, of a later one; then wait until no message moves
        from or to the user's memory any more."""
        mine = replace(
            wire.unpack(self._plan.preamble), sender=self._plan.rank, step=self._step
        )
        here = _as_tensor(wire.error_preamble(mine))
        later = self._transport.error_preamble(self._step)
        self._transport.gave_up = True
        self._abandon((self._posted, self._buffers))
        for peer in range(self._plan.world_size):
            if peer == self._plan.rank:
                continue
            message = here if self._awaits(peer) else later
            with contextlib.suppress(CommkernError):
                work = self._send(message, peer, wire.PREAMBLE_TAG)
                self._abandon((message, work))
        self._let_go()

    def _let_go(self) -> None:
        """A body follows a preamble that matches, and nothing one that does not. A peer
        that was sent every preamble may end well, so all that it gets has to leave."""
        writers = self._plan.writers
        for number, posted in enumerate(self._posted):
            self._read_preambles(number, writers - self._silent)
            arriving = [p for p in posted.pieces if p[0] in writers & posted.matching]
            leaving = [p for p in posted.sends if not self._awaits(p[0])]
            for peer, work in (*arriving, *leaving):
                with contextlib.suppress(CommkernError):
                    self._wait(work, peer)

    def _awaits(self, peer: int) -> bool:
        """Whether a round is left whose preamble has not been sent to this peer."""
        exchanges = self._plan.exchanges
        reached = self._next_round < len(exchanges) and peer in self._reached
        return self._next_round + reached < len(exchanges)

    # --- pieces -------------------------------------------------------------------

    def _view(self, piece: Slice) -> torch.Tensor:
        return self._buffers.view(piece)

    def _preamble(self, buffer: str, number: int, peer: int) -> torch.Tensor:
        return self._view(self._plan.preamble_place(buffer, number, peer))

    def _send(self, piece: torch.Tensor, peer: int, tag: int) -> Any:
        self._transport.bytes_sent += piece.numel()
        carrier = self._carrier(self._plan.rank, peer)
        try:
            return carrier.send([piece], peer, tag)
        except RuntimeError as error:
            raise lost(peer, self._step, error) from error

    def _receive(self, piece: torch.Tensor, peer: int, tag: int) -> Any:
        carrier = self._carrier(peer, self._plan.rank)
        try:
            return carrier.recv([piece], peer, tag)
        except RuntimeError as error:
            raise lost(peer, self._step, error) from error

    def _carrier(self, sender: int, receiver: int) -> Any:
        return self._connections.carrier(self._transport.group, sender, receiver)

    def _wait(self, work: Any, peer: int) -> None:
        try:
            self._connections.wait(work, lost=peer in self._lost)
        except RuntimeError as error:
            self._lost.add(peer)
            raise lost(peer, self._step, error) from error

    def _wait_for_all(self, works: _Works) -> None:
        while works:
            peer, work = works[0]
            self._wait(work, peer)
            del works[0]

    def _abandon(self, held: Any) -> None:
        """Keep works and buffers that can no longer complete until the group goes."""
        self._connections.abandoned.append(held)

    # --- agreement ----------------------------------------------------------------

    def _check_preambles(self, number: int) -> None:
        """Raise for a peer that is lost, failed or called with something else."""
        peers = {transfer.peer for transfer in self._plan.exchanges[number].receives}
        lost, differing = self._read_preambles(number, peers)
        # In rank order, so that no three ranks wait for each other in a circle.
        errors = [self._explain(peer, number) for peer in sorted(differing)]
        # What this rank found itself says more than that a peer gave up.
        mismatches = [e for e in errors if isinstance(e, MismatchError)]
        for found in (*mismatches, lost, *errors):
            if found is not None:
                raise found

    def _read_preambles(
        self, number: int, peers: AbstractSet[int]
    ) -> tuple[PeerLost | None, list[int]]:
        """Wait for these peers' preambles: the first loss, and whose differ."""
        lost: PeerLost | None = None
        differing: list[int] = []
        posted = self._posted[number]
        for peer, work in [p for p in posted.preambles if p[0] in peers]:
            try:
                self._wait(work, peer)
            except PeerLost as error:
                lost = lost or error
                continue
            posted.preambles.remove((peer, work))
            received = self._preamble("preambles_in", number, peer)
            expected = self._preamble("preambles_expected", number, peer)
            if torch.equal(received, expected):
                posted.matching.add(peer)
            else:
                self._silent.add(peer)
                differing.append(peer)
        return lost, differing

    def _explain(self, peer: int, number: int) -> CommkernError:
        expected, received = (
            self._preamble(buffer, number, peer).numpy().tobytes()
            for buffer in ("preambles_expected", "preambles_in")
        )
        return explain(
            expected,
            received,
            peer=peer,
            step=self._step,
            description=self._plan.description,
            exchange_text=lambda text: self._exchange_text(peer, text),
        )

    def _exchange_text(self, peer: int, mine: str) -> str:
        """Both ends of a mismatch see it, so each tells the other what it has."""
        raw = mine.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
        sent = _as_tensor(raw)
        received = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
        works: list[Any] = []
        self._abandon((works, sent, received))
        try:
            works.append(self._receive(received, peer, _TEXT_TAG))
            works.append(self._send(sent, peer, _TEXT_TAG))
            for work in works:
                self._wait(work, peer)
        except PeerLost:
            return "(not told)"
        return received.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
