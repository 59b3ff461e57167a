"""What ranks must agree on, and what to tell the user where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from commkern.errors import CommkernError, MismatchError, PeerFailed
from commkern.layout import Member
from commkern.wire.crc import hash_text
from commkern.wire.preamble import difference, pack_template, unpack

_SHOWN = 200


def describe(members: Sequence[Member], settings: object, dtype: str) -> dict[str, str]:
    """The texts that must be equal on all ranks, by the preamble's field."""
    return {
        "compressor": ";".join(str(m.compressor) for m in members),
        "settings": str(settings),
        "parameter names": ";".join(m.name for m in members),
        "shapes": ";".join(str(m.numel) for m in members),
        "dtypes": dtype,
    }


def preamble_template(description: Mapping[str, str], world_size: int) -> bytes:
    """The preamble of these texts, without what differs between messages."""
    hashes = [hash_text(text) for text in description.values()]
    return pack_template(*hashes, world_size=world_size)


def explain(
    expected: bytes,
    received: bytes,
    *,
    peer: int,
    step: int,
    description: Mapping[str, str],
    exchange_text: Callable[[str], str] | None = None,
) -> CommkernError:
    """The exception for two preambles that differ.

    ``description`` holds the texts behind the preamble's hashes. ``exchange_text``
    sends our text to the peer and returns the peer's; without it the hashes are shown.
    """
    found = difference(expected, received)
    assert found is not None, "called for equal preambles"
    if found.field == "error":
        return gave_up(peer, unpack(received).step, found.theirs)
    mine, theirs = found.mine, found.theirs
    if found.field in description and exchange_text is not None:
        mine = description[found.field]
        mine, theirs = _first_difference(mine, exchange_text(mine))
    return MismatchError(
        f"rank {peer} differs in {found.field} in step {step}: "
        f"{theirs} there, {mine} here",
        rank=peer,
        step=step,
    )


def gave_up(peer: int, step: int, why: str) -> PeerFailed:
    """The exception where a peer says that it failed, in ``step`` of its own."""
    return PeerFailed(
        f"rank {peer} gave up in step {step}: {why}", rank=peer, step=step
    )


def _first_difference(mine: str, theirs: str) -> tuple[str, str]:
    """The first items in which two lists (joined by semicolons) differ."""
    pairs = zip_longest(mine.split(";"), theirs.split(";"), fillvalue="nothing")
    here, there = next(((a, b) for a, b in pairs if a != b), (mine, theirs))
    return here[:_SHOWN], there[:_SHOWN]
