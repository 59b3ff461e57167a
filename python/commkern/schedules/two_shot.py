"""Two-shot all-reduce: everybody to the owner, the owner to everybody.

2 rounds; each rank sends 2 (n - 1) / n of the coded bytes. The owner of a chunk sums
all ranks' parts in rank order, so the result does not depend on who owns what.
"""

from __future__ import annotations

from commkern.schedules.base import Round, Transfer


def two_shot(world_size: int, rank: int) -> tuple[Round, ...]:
    """The rounds of ``rank``.

    >>> [r.phase for r in two_shot(3, 0)]
    ['reduce', 'gather']
    >>> two_shot(3, 1)[0].sends
    (Transfer(peer=2, chunk=2), Transfer(peer=0, chunk=0))
    """
    # Start behind the own rank, so that peers are not all sent to at the same moment.
    peers = [(rank + distance) % world_size for distance in range(1, world_size)]
    theirs = tuple(Transfer(peer, peer) for peer in peers)
    mine = tuple(Transfer(peer, rank) for peer in peers)
    return Round("reduce", theirs, mine), Round("gather", mine, theirs)
