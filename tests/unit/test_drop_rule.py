"""Which slots dropping leaves out, and where their weight goes."""

from __future__ import annotations

import numpy as np
from support.policies import weighed

from routeahead.policies.drop import DropCold


def test_equals_below_the_mean_survive() -> None:
    """Rounded, three equal shares may each be below a third; the top one of them is kept."""
    for weight in np.random.default_rng(0).random(200, np.float32):
        drop = DropCold(1.0)
        weights = np.full((1, 3), weight, np.float32)
        drop.weighted(weighed(np.array([[1, 2, 3]], np.int32), weights))
        assert drop.dropped < 3


def test_an_expert_that_one_row_keeps_is_kept_by_all() -> None:
    drop = DropCold(1.0, in_prefill=True)
    ids = np.array([[1, 2], [3, 1]], np.int32)
    weights = np.array([[0.9, 0.1], [0.8, 0.2]], np.float32)
    routing = weighed(ids, weights)
    drop.weighted(routing)
    assert routing.dropped is not None  # row 0 reads expert 1 for itself
    assert routing.dropped.tolist() == [[False, True], [False, False]]
    assert ids.tolist() == [[1, 1], [3, 1]]
    assert weights.tolist() == [[np.float32(0.9), 0], [np.float32(0.8), np.float32(0.2)]]


def test_survivors_get_the_mass() -> None:
    drop = DropCold(1.0, renorm=True)
    ids, weights = np.array([[5, 6, 7, 8]], np.int32), np.array([[4, 3, 2, 1]], np.float32)
    drop.weighted(weighed(ids, weights, resident={7}))
    assert ids.tolist() == [[5, 6, 7, 5]]
    np.testing.assert_allclose(weights, [[4 / 0.9, 3 / 0.9, 2 / 0.9, 0]], rtol=1e-6)
    assert (drop.slots, drop.dropped) == (4, 1)
