"""The prefetcher that guesses the last token's experts again."""

from __future__ import annotations

import numpy as np

from routeahead.policies.prefetch import TemporalPrefetch


def test_temporal_guesses_the_last_token() -> None:
    prefetch = TemporalPrefetch([1, 3, 4], depth=2)
    assert list(prefetch.guesses(1)) == []
    prefetch.routed(3, np.array([[7, 8], [5, 6]], np.int32))
    prefetch.routed(4, np.array([[2, 1]], np.int32))
    assert list(prefetch.guesses(1)) == [(3, [5, 6]), (4, [2, 1])]
    assert list(prefetch.guesses(3)) == [(4, [2, 1])]
    assert list(prefetch.guesses(4)) == []
