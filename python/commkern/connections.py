"""A connection for each direction between two ranks.

gloo has one socket for each pair of ranks, and cannot read from it while it writes to
it: with messages both ways its thread spins on a core that the ranks need. So messages
to lower ranks travel on a gloo group of our own, with the same ranks. It is made when a
group is first used, over that group, and closed with it. It is no group of torch's
(``dist.new_group``): that would have to be called by all ranks of the world, or take
its name from what each rank did before.

Where there is no second one, as with another backend, the user's group carries both
directions.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commkern import rendezvous
from commkern.wire.preamble import PREAMBLE_TAG

_BUILD = timedelta(seconds=60)  # at most: all ranks are there by then
_LAST_CALL = timedelta(seconds=1)


@dataclass(eq=False)
class Connections:
    """What carries the messages of one group, and what must live as long as it.

    ``downward`` is the group for messages to lower ranks, None where the user's group
    carries them too; ``store`` is where it found its ranks. ``opened`` says whether
    ranks have agreed on that. ``abandoned`` holds works and buffers that can no longer
    complete.
    """

    downward: Any = None
    timeout: timedelta | None = None
    store: Any = None
    opened: bool = True
    abandoned: list[Any] = field(default_factory=list)

    def carrier(self, group: dist.ProcessGroup, sender: int, receiver: int) -> Any:
        """The group whose ``send`` and ``recv`` take a message from here to there."""
        if self.downward is None or sender < receiver:
            return group
        return self.downward

    def wait(self, work: Any, *, lost: bool = False) -> None:
        """Wait for a work of either group, at most for the user's time-out.

        From a peer that is ``lost`` nothing is expected any more. gloo closes its
        connections after a time-out, so that no message of the peer's comes later.
        """
        if self.timeout is None:
            work.wait()
        else:
            work.wait(min(self.timeout, _LAST_CALL) if lost else self.timeout)


_OPEN: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections] = (
    weakref.WeakKeyDictionary()
)


def connections(group: dist.ProcessGroup, step: int) -> Connections:
    """The connections of a group, made at first use; every rank calls it then.

    Raises PeerLost naming a rank that does not call it within the group's time-out, or
    that dies, and PeerFailed for one that fails before it has done so.
    """
    found = _OPEN.get(group)
    if found is None:
        found = _OPEN[group] = Connections()
        if group.size() > 1:
            _open(group, found, step)
    return found


def give_up(group: dist.ProcessGroup, step: int, error_preamble: torch.Tensor) -> None:
    """Tell all ranks that this one failed in ``step``: whatever they wait for from it
    ends with PeerFailed, be it the opening of connections or the next preamble.

    Nothing may be sent to them later. Does not wait.
    """
    found = _OPEN.get(group)
    if found is None and _gloo(group) is None:  # nothing to agree on
        found = connections(group, step)
    if found is None:
        found = _OPEN[group] = Connections(opened=False)
    if not found.opened:
        rendezvous.give_up(group, step, found.abandoned)
        return
    mine = group.rank()
    for peer in range(group.size()):
        if peer != mine:
            with contextlib.suppress(RuntimeError):  # that rank is gone
                carrier = found.carrier(group, mine, peer)
                work = carrier.send([error_preamble], peer, PREAMBLE_TAG)
                found.abandoned.append((error_preamble, work))


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
    timeout: timedelta = gloo.options._timeout
    # Whoever fails tells the others, and they have to wait for that.
    limit = min(timeout / 2, _BUILD)
    mine.opened = False
    built = rendezvous.second_group(group, limit, step, mine.abandoned)
    mine.opened = True
    if built.group is not None:
        mine.downward, mine.timeout, mine.store = built.group, timeout, built.box
        return
    cause = built.reason or "another rank could not open its own"
    warnings.warn(
        f"no second connection between the ranks ({cause}); both directions share the "
        "group's, which is slower",
        RuntimeWarning,
        stacklevel=2,
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
