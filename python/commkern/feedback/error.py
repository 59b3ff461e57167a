"""Error feedback: what a step's coding lost is added to the next step's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from commkern.compressors.base import KernelCall, Operands
from commkern.feedback.base import Feedback, register


@register
@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Error feedback with fp32 residuals in units of the sum.

    Whoever codes keeps the error: a rank that of its own gradient, the owner of a chunk
    that of the sum as well. Then the sum of all results plus the mean of the ranks'
    residuals is the sum of all mean gradients.

    Parameters
    ----------
    decay : above 0, at most 1
        What is kept of the error. Below 1 old errors fade, and so does what they would
        have brought back: results no longer add up to the gradients.

    Source: Seide et al. (2014); Karimireddy et al. (2019); decayed: Wu et al., "Error
    compensated quantized SGD and its applications to large-scale distributed
    optimization" (2018).
    """

    name: ClassVar[str] = "error"

    decay: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.decay, (int, float))
        if not number or isinstance(self.decay, bool):
            raise TypeError(f"error: decay must be a number, got {self.decay!r}")
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"error: decay must be above 0 and at most 1, got {self.decay}"
            )

    def settle_calls(self, on: Operands, data: Any) -> list[KernelCall]:
        """The residual times ``decay``."""
        if self.decay == 1:
            return []
        fields = {"spans": on.spans, "residual": on.residual, "factor": self.decay}
        return [KernelCall("residual_scale", fields)]
