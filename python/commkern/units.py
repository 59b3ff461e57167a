"""What residuals are measured in: the loss scale and, if asked, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Reading(NamedTuple):
    """The units of a step; ``learning_rate`` is None where it is not followed."""

    loss_scale: float
    learning_rate: float | None


class Units:
    """Follows the loss scale and the learning rate.

    A gradient grows with the loss scale, and so must what is kept of earlier ones. A
    residual stands for the update learning rate x residual: that keeps its size if the
    residual is multiplied by old / new when the rate changes (Zheng et al. 2019,
    "Communication-efficient distributed blockwise momentum SGD with error-feedback").
    A rate of 0 has no such factor: residuals stay as they are at the change to 0 and at
    the one away from it. A scaler that has given up (scale 0) leaves them, too.
    """

    def __init__(
        self, grad_scaler: Any, learning_rate: Callable[[], float] | None
    ) -> None:
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must have get_scale(), got {grad_scaler!r}")
        if learning_rate is not None and not callable(learning_rate):
            raise TypeError(
                "learning_rate must be a callable that returns the current rate, got "
                f"{learning_rate!r}"
            )
        self._grad_scaler = grad_scaler
        self._learning_rate = learning_rate
        self.current = Reading(1.0, None)

    def read(self) -> Reading:
        """The units of the step that begins, called on the thread of backward().

        Raises ValueError for a scale or a learning rate that is negative or not finite,
        TypeError for what is no number.
        """
        scale = 1.0
        rate: float | None = None
        if self._grad_scaler is not None:
            given = self._grad_scaler.get_scale()
            scale = _number("grad_scaler.get_scale()", given, self.current.loss_scale)
        if self._learning_rate is not None:
            given = self._learning_rate()
            rate = _number("learning_rate()", given, self.current.learning_rate)
        return Reading(scale, rate)

    def follow(self, new: Reading) -> tuple[float, float]:
        """Make ``new`` the current units.

        Returns what gradients kept from earlier steps are to be multiplied by, and what
        residuals are to be multiplied by beyond that.
        """
        old = self.current
        self.current = Reading(
            new.loss_scale or old.loss_scale,
            old.learning_rate if new.learning_rate is None else new.learning_rate,
        )
        return (
            _ratio(self.current.loss_scale, old.loss_scale),
            _ratio(old.learning_rate, self.current.learning_rate),
        )


def _number(what: str, given: Any, before: float | None) -> float:
    try:
        if isinstance(given, (bool, str)):
            raise TypeError
        number = float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(
            f"{what} must return a number, got {given!r} after {before}"
        ) from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{what} must return a positive number, or 0, got {number} after {before}"
        )
    return number


def _ratio(above: float | None, below: float | None) -> float:
    return above / below if above and below else 1.0
