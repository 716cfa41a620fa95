"""What a benchmark may conclude from a few noisy runs. Functions of numbers alone.

Two cells are compared pair by pair: a pair is one run of each in the same pass, minutes apart at
most, so that whatever drifts on the machine (temperature, other users) affects both alike and
cancels in their ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

CONFIDENCE = 0.99
LEAST_PAIRS = 10
# A smaller difference is not claimed, however certain it is: recompiling the same code or moving it
# in memory changes as much.
LEAST_EFFECT = 1.02

Verdict = Literal["win", "loss", "no difference shown", "too few pairs"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one figure over its runs."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Ratio:
    """A cell's figure as a multiple of the baseline's, over pairs.

    Attributes:
        pairs: how many.
        median: of the pairs' ratios.
        low, high: ends of the 99 % interval of the median ratio; None if there are too few
            pairs to give one.
    """

    pairs: int
    median: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> Verdict:
        """Whether a ratio of figures of which more is better is a win, a loss or neither.

        Both need LEAST_PAIRS pairs, an interval that leaves out 1, and more than 2 %. With fewer
        pairs nothing is said, however large the ratio.
        """
        if self.pairs < LEAST_PAIRS or self.low is None or self.high is None:
            return "too few pairs"
        if self.low > 1 and self.median > LEAST_EFFECT:
            return "win"
        if self.high < 1 and self.median < 1 / LEAST_EFFECT:
            return "loss"
        return "no difference shown"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (linear interpolation between order statistics, NumPy's default).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take the median of")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Median of values[i] / baseline[i], and its 99 % interval.

    The interval lies between two order statistics of the ratios: it is the inversion of the sign
    test. It covers the median at least that often whatever the distribution, and outliers, which a
    machine with other users produces, do not move it: one pair in twelve may disagree, two in
    fifteen (but none in ten). A t interval on logarithms is narrower if noise is normal, but a
    single outlier makes it useless.

    Source: W. R. Thompson, "On confidence ranges for the median and other expectation
    distributions", Annals of Mathematical Statistics 7 (1936); H. A. David and H. N. Nagaraja,
    "Order Statistics", 3rd ed. (2003), section 7.1. SciPy's `quantile_test` gives the same.

    Raises:
        ValueError: not the same number of both, none, or one that is not positive.
    """
    if not values or min(*values, *baseline) <= 0:
        raise ValueError("a ratio needs positive figures")
    # Logarithms, so that a / b and b / a are reciprocals also if two middle pairs are averaged.
    logs = sorted(math.log(v / b) for v, b in zip(values, baseline, strict=True))
    median = math.exp(statistics.median(logs))
    outside = ends_left_out(len(logs))
    if outside is None:
        return Ratio(len(logs), median, None, None)
    return Ratio(len(logs), median, math.exp(logs[outside]), math.exp(logs[-1 - outside]))


def ends_left_out(count: int) -> int | None:
    """How many of `count` sorted values lie outside the median's 99 % interval at either end.

    Each value falls below the true median with probability 1/2, so fewer than k + 1 of them do so
    with the binomial tail's probability. None if even all values together cover less.
    """
    tails = accumulate(math.comb(count, below) for below in range(count))
    fitting = sum(tail / 2**count <= (1 - CONFIDENCE) / 2 for tail in tails)
    return fitting - 1 if fitting else None
