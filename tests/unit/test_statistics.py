"""A benchmark's conclusions, on synthetic numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from routeahead.bench.statistics import ends_left_out, paired_ratio, spread


def test_spread_is_median_and_quartiles() -> None:
    values = [9.0, 1.0, 4.0, 2.0, 7.0]
    found = spread(values)
    assert (found.lower, found.median, found.upper) == tuple(np.percentile(values, [25, 50, 75]))
    one = spread([3.0])
    assert (one.lower, one.median, one.upper) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        spread([])


@pytest.mark.parametrize("count", range(1, 15))
def test_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    """All patterns of above and below the true median, which are equally likely."""
    below = [sum(pattern) for pattern in product((0, 1), repeat=count)]

    def coverage(outside: int) -> float:
        """The interval from value `outside` to its mirror image holds the median between them."""
        return float(np.mean([outside < number < count - outside for number in below]))

    outside = ends_left_out(count)
    if outside is None:
        assert coverage(0) < 0.99
    else:
        assert coverage(outside) >= 0.99 > coverage(outside + 1)


def test_interval_ends_are_known() -> None:
    # Ranks from 1 in printed tables: n = 8 → 1, 12 → 2, 20 → 4, 30 → 8.
    assert [ends_left_out(n) for n in (7, 8, 11, 12, 20, 30)] == [None, 0, 0, 1, 3, 7]


def test_drift_that_both_share_leaves_no_trace() -> None:
    drift = np.linspace(1, 3, 10)
    found = paired_ratio((1.1 * drift).tolist(), drift.tolist())
    assert found.pairs == 10
    assert (found.low, found.median, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_swapping_the_cells_gives_the_reciprocal() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.lognormal(size=(2, 14)).tolist()
    there, back = paired_ratio(first, second), paired_ratio(second, first)
    assert there.low and there.high and back.low and back.high
    assert there.median == pytest.approx(1 / back.median)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    assert (there.low, there.high) == pytest.approx((ratios[1], ratios[-2]))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.05] * 10, "win"),
        ([0.95] * 10, "loss"),
        ([1.05] * 9, "too few pairs"),
        ([16.0] * 2, "too few pairs"),
        ([1.05] * 9 + [0.99], "no difference shown"),  # the interval reaches below 1
        ([1.05] * 11 + [0.5], "win"),  # of twelve, one may say otherwise
        ([1.05] * 10 + [0.5] * 2, "no difference shown"),
        ([1.019] * 20, "no difference shown"),  # certain, and too small to matter
        ([0.981] * 20, "no difference shown"),
        ([0.95] * 9 + [1.01], "no difference shown"),
        ([1.0] * 20, "no difference shown"),
    ],
)
def test_verdict(ratios: list[float], verdict: str) -> None:
    assert paired_ratio(ratios, [1.0] * len(ratios)).verdict == verdict


def test_noise_alone_is_seldom_called_a_difference() -> None:
    """Noise with wild values, as a shared machine has it: at most 1 % of false claims."""
    rng = np.random.default_rng(1)
    claims = 0
    for _ in range(3000):
        runs = np.exp(0.03 * rng.standard_t(df=2, size=(2, 12)))
        claims += paired_ratio(*runs.tolist()).verdict != "no difference shown"
    assert claims <= 30


@pytest.mark.parametrize(("values", "baseline"), [([], []), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_ratio_needs_positive_figures(values: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        paired_ratio(values, baseline)


def test_ratio_needs_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])
