"""What a transport or a header check found out about a peer, and the error to raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from commkern.agreement import explain
from commkern.errors import (
    CommkernError,
    MismatchError,
    PayloadError,
    PeerFailed,
    PeerLost,
)
from commkern.wire.preamble import difference

Kind = Literal["mismatch", "lost", "failed", "corrupt"]


class Failure(Exception):  # noqa: N818 - becomes one of commkern.errors
    """``peer`` did something (``kind``) and ``observer`` saw it; both are ranks.

    Raised by the compiled runner and by transports of threads, which know neither the
    step nor the texts behind a preamble's hashes. ``received`` and ``expected`` are the
    peer's preamble and the observer's, for a mismatch.
    """

    def __init__(
        self,
        kind: Kind,
        peer: int,
        observer: int,
        text: str,
        received: bytes = b"",
        expected: bytes = b"",
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.peer = peer
        self.observer = observer
        self.text = text
        self.received = received
        self.expected = expected

    def error(
        self, *, rank: int, step: int, description: Mapping[str, str]
    ) -> CommkernError:
        """The exception that ``rank`` shows to its user."""
        if self.kind == "mismatch":
            return self._mismatch(rank, step, description)
        if self.kind == "corrupt":
            return PayloadError(f"rank {rank}, step {step}: {self.text}")
        made = PeerLost if self.kind == "lost" else PeerFailed
        verb = "was lost" if self.kind == "lost" else "failed"
        return made(
            f"rank {self.peer} {verb} in step {step}: {self.text}",
            rank=self.peer,
            step=step,
        )

    def _mismatch(
        self, rank: int, step: int, description: Mapping[str, str]
    ) -> CommkernError:
        peer, mine, theirs = self.peer, self.expected, self.received
        if rank == peer:  # we were refused: say what the one who refused has
            peer, mine, theirs = self.observer, theirs, mine
        elif rank != self.observer:
            return self._mismatch_of_others(step)
        return explain(mine, theirs, peer=peer, step=step, description=description)

    def _mismatch_of_others(self, step: int) -> MismatchError:
        found = difference(self.expected, self.received)
        field, here, there = found or ("preamble", "", "")
        return MismatchError(
            f"rank {self.peer} differs in {field} from rank {self.observer} "
            f"in step {step}: {there} at rank {self.peer}, {here} at rank "
            f"{self.observer}",
            rank=self.peer,
            step=step,
        )


def lost(peer: int, step: int, error: Exception) -> PeerLost:
    """What to raise where a transfer from or to a peer failed."""
    return PeerLost(
        f"rank {peer} was lost in step {step}: {error}", rank=peer, step=step
    )
