"""EF21: what is coded is the change of the gradient, and every rank keeps the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from commkern.compressors.base import KernelCall, Operands
from commkern.feedback.base import Feedback, register


@register
@dataclass(frozen=True)
class EF21(Feedback):
    """Every rank codes the difference of its gradient to its own estimate of it, and
    adds what it sent to this estimate; the result is the mean of the estimates.

    ``h_i += C(g_i - h_i)`` and ``w = mean_i h_i``, all zero at the beginning. A rank's
    residual holds ``-h_i``, its owner's errors included; all ranks keep ``w``, the
    estimate of the mean gradient, as fp32. So ``w = -mean of residuals`` at all times.
    Where gradients settle, the result converges to their mean, for every compressor
    that has a contraction; with plain error feedback only the average of the results
    does. A result follows a gradient that changes with a delay.

    Needs ``rollback=True``: after a spoilt step in place, results and residuals would
    disagree for ever.

    Source: Richtárik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better,
    and practically faster error feedback" (2021).
    """

    name: ClassVar[str] = "ef21"
    accumulates: ClassVar[bool] = True
    needs_rollback: ClassVar[bool] = True

    def settle_calls(self, on: Operands, data: Any) -> list[KernelCall]:
        """Take the gradient out of the residual again, which leaves -h - C(g - h)."""
        fields = {"spans": on.spans, "input": data, "dtype": on.dtype}
        return [KernelCall("residual_subtract", fields | {"residual": on.residual})]


def accumulated(
    decoding: Sequence[KernelCall], fields: dict[str, Any]
) -> list[KernelCall]:
    """Decode in the compute type, which loses nothing, and add to the running sum.

    ``fields`` are those of the kernel ``accumulate``.
    """
    short = fields["dtype"] in ("float16", "bfloat16")
    wide = {"dtype": "float32"} if short else {}
    calls = [KernelCall(name, given | wide) for name, given in decoding]
    return [*calls, KernelCall("accumulate", fields)]
