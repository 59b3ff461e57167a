"""Exceptions. Caller mistakes are ValueError or TypeError; everything that a peer, a
payload or a device did is a CommkernError."""

from __future__ import annotations


class CommkernError(RuntimeError):
    """Base of every failure that is not the caller's mistake."""


class BackendError(CommkernError):
    """The compiled module is missing, broken or unable to do what was asked."""


class PayloadError(CommkernError):
    """Bytes that are not a valid commkern message (cut, corrupted, other version)."""


class NonFiniteError(CommkernError):
    """A NaN or an Inf reached a reduction with ``nonfinite="raise"``."""


def not_finite(step: int) -> NonFiniteError:
    """The error that every rank raises for a step."""
    return NonFiniteError(
        f"a gradient held NaN or Inf in step {step}; residuals are as before"
    )


class LedgerError(CommkernError):
    """Results and residuals do not add up to the gradients that were given."""


class PeerError(CommkernError):
    """A failure that another rank caused; ``rank`` and ``step`` say which and when."""

    def __init__(self, message: str, *, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args[0], self.rank, self.step)


class PeerLost(PeerError):  # noqa: N818 - the name of the event, as users say it
    """A rank stopped answering: its process died or the group's time-out passed."""


class PeerFailed(PeerError):  # noqa: N818
    """A rank reported an exception of its own instead of sending its data."""


class MismatchError(PeerError):
    """Ranks called with different compressors, sizes, dtypes, settings or steps."""


class ReplicasDiffer(CommkernError):  # noqa: N818
    """Ranks hold different bits; ``name`` is the first tensor in question, ``ranks``
    those that hold something else than most (all of them where there is no most)."""

    def __init__(self, message: str, *, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_differ, (self.args[0], self.name, self.ranks)


def _rebuild_differ(message: str, name: str, ranks: tuple[int, ...]) -> ReplicasDiffer:
    return ReplicasDiffer(message, name=name, ranks=ranks)


def _rebuild(cls: type[PeerError], message: str, rank: int, step: int) -> PeerError:
    return cls(message, rank=rank, step=step)
