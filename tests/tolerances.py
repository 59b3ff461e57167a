"""The one table of tolerances, each with its derivation.

u is the unit roundoff of the compute type (2^-24 for fp32, 2^-53 for fp64), eta its
smallest denormal, s a block's scale, L = 2^(bits-1) - 1 the largest code.

Compare with ``assert_within``: it fails where either side is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST_DENORMAL = {"float32": 2.0**-149, "float64": 2.0**-1074}

# Standard deviations granted to a sample mean. Hoeffding: a mean of n values within one
# step misses its expectation by k / (2 sqrt(n)) steps with probability at most
# 2 exp(-k^2 / 2); 1e-7 for k = 6, and seeds are fixed.
SIGMAS = 6.0

# (byte + 0.5) / 256 takes 256 values, so P(round up) is a multiple of 1/256 that
# differs from the fraction by at most 1/512: the bias of a mean, in steps.
STOCHASTIC_BIAS = 1 / 512

# fp16 data of magnitude 1e-6 (denormal there) at 8 bits: the error of an element is at
# most s / 2 = absmax / 254 = 0.4 % of the largest, and none is below half of that.
SMALL_HALF_RELATIVE = 0.01


def quantize_nearest(scale: Any, bits: int, compute: str) -> Any:
    """Largest |dequantize(quantize(a)) - a| with nearest rounding.

    r = 1/s and a*r round once each, so a*r is within L * 3u of a/s; rint adds 1/2 and
    code * s another L * u: s * (1/2 + 4 u L), taken twice for the second order. A
    denormal s misses absmax / L by up to eta / 2, which the clamp multiplies by L.
    """
    largest = 2 ** (bits - 1) - 1
    rounding = 8 * UNIT_ROUNDOFF[compute] * largest
    return scale * (0.5 + rounding) + largest * SMALLEST_DENORMAL[compute] / 2


def quantize_stochastic(scale: Any, bits: int, compute: str) -> Any:
    """Largest |dequantize(quantize(a)) - a| with stochastic rounding.

    As ``quantize_nearest``, with a floor in the place of rint: an error below one step,
    and one more rounding, that of a*r + u (another L * u).
    """
    largest = 2 ** (bits - 1) - 1
    rounding = 10 * UNIT_ROUNDOFF[compute] * largest
    return scale * (1 + rounding) + largest * SMALLEST_DENORMAL[compute] / 2


def stochastic_mean(scale: Any, samples: int) -> Any:
    """Largest |mean of dequantized - a| over independent draws."""
    return scale * (STOCHASTIC_BIAS + SIGMAS / (2 * np.sqrt(samples)))


def sum_of_ranks(magnitudes: Any, ranks: int, compute: str) -> Any:
    """Largest error of a sum in rank order, times a scale, against exact sums.

    N. Higham, "Accuracy and Stability of Numerical Algorithms", (4.3): n - 1 additions
    and one product give at most n u / (1 - n u) times the sum of magnitudes.
    """
    steps = ranks * UNIT_ROUNDOFF[compute]
    return magnitudes * steps / (1 - steps)


def hadamard(norm: Any, size: int, transforms: int, compute: str) -> Any:
    """Largest 2-norm of the error of ``transforms`` transforms of ``size`` values.

    A level is sqrt(2) times an orthogonal matrix, and rounding each of its sums once
    adds an error of at most u times the norm of the result. So log2(n) levels, the
    rounding of 2^(-k/2) and the product with it multiply the norm by (1 + u)^(k + 2) at
    most; Higham, Lemma 3.1, bounds that less 1. The error of an element is no larger.
    """
    steps = transforms * (size.bit_length() + 1) * UNIT_ROUNDOFF[compute]
    return norm * steps / (1 - steps)


def assert_within(got: Any, want: Any, tolerance: Any, label: str = "value") -> None:
    """|got - want| <= tolerance everywhere; a NaN on any side fails."""
    __tracebackhide__ = True
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(got - want) <= tolerance)
    if bad.any():
        first = np.flatnonzero(bad)[0]
        bound = np.broadcast_to(tolerance, bad.shape).reshape(-1)[first]
        raise AssertionError(
            f"{label}: {bad.sum()} of {bad.size} outside, first at {first}: "
            f"{got.reshape(-1)[first]!r} instead of {want.reshape(-1)[first]!r} "
            f"+- {bound!r}"
        )
