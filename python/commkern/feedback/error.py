"""Error feedback: what a step's coding lost is added to the next step's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commkern.feedback.base import Feedback, register


@register
@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Plain error feedback with fp32 residuals in units of the sum.

    Whoever codes keeps the error: a rank that of its own gradient, the owner of a chunk
    that of the sum as well. Then the sum of all results plus the mean of the ranks'
    residuals is the sum of all mean gradients.

    Source: Seide et al. (2014); Karimireddy et al. (2019).
    """

    name: ClassVar[str] = "error"
