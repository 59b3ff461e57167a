"""Error feedback as settings; the tensors live in the state that uses them."""

from __future__ import annotations

from commkern.feedback.base import Feedback, feedback
from commkern.feedback.ef21 import EF21, accumulated
from commkern.feedback.error import ErrorFeedback

__all__ = ["EF21", "ErrorFeedback", "Feedback", "accumulated", "feedback"]
