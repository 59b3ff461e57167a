"""Run a plan: compiled, or in Python under ``COMMKERN_BACKEND=reference``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from commkern import backend, reference_runner
from commkern.arrays import Bytes
from commkern.failure import Failure
from commkern.plan import REGISTERS, Plan, lower

_COMPILED: weakref.WeakKeyDictionary[Plan, Any] = weakref.WeakKeyDictionary()


def run(
    plan: Plan, buffers: Sequence[Bytes], registers: Mapping[str, int], transport: Any
) -> dict[str, int]:
    """Run every step of ``plan``; nanoseconds by purpose, and in ``exchange`` steps.

    ``buffers`` are writable byte arrays, one for each of ``plan.buffers`` and in that
    order; ``registers`` holds a value for each of ``plan.REGISTERS``. ``transport`` is
    a compiled thread endpoint, or any object with ``post(round)``, ``complete(round)``
    and, if it can, ``abort(error)``; the first two are called once per round each.

    Raises ValueError, before anything is written, for buffers too small and for what a
    kernel does not accept; MismatchError, PeerLost, PeerFailed and PayloadError for
    what peers did; anything that the transport raises as itself. In each case the
    transport is aborted, so that peers need not wait.
    """
    try:
        if backend.name() == "reference":
            return reference_runner.run(plan, buffers, registers, transport)
        values = [registers[name] for name in REGISTERS]
        times: dict[str, int] = compiled(plan).run(list(buffers), values, transport)
        return times
    except Failure as failure:
        error = failure.error(
            rank=plan.rank, step=registers["step"], description=plan.description
        )
        _abort(transport, error)
        raise error from None
    except BaseException as error:
        _abort(transport, error)
        raise


def compiled(plan: Plan) -> Any:
    """The plan's compiled form (``_core.Plan``), made once."""
    found = _COMPILED.get(plan)
    if found is None:
        found = _COMPILED[plan] = backend.core().Plan(**lower(plan))
    return found


def _abort(transport: Any, error: BaseException) -> None:
    abort = getattr(transport, "abort", None)
    if abort is not None:
        abort(error)
