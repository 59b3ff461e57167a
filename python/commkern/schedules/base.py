"""The words of a schedule."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Transfer(NamedTuple):
    """One message of a round: the peer, and whose chunk it carries."""

    peer: int
    chunk: int


class Round(NamedTuple):
    """Messages that travel at the same time."""

    phase: Literal["reduce", "gather"]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
