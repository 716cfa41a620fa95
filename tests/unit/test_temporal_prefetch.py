"""The prefetcher that guesses the last token's experts again."""

from __future__ import annotations

import numpy as np
from support.policies import Reads, model, routing

from routeahead.policies.prefetch import TemporalPrefetch


def test_temporal_guesses_the_last_token() -> None:
    prefetch, reads = TemporalPrefetch(depth=2), Reads()
    prefetch.bind(model([1, 3, 4], reads=reads))
    for layer, rows in ((1, [[0, 9]]), (3, [[7, 8], [5, 6]]), (4, [[2, 1]])):
        prefetch.issued(routing(layer, np.array(rows, np.int32), phase="prefill"))
    assert reads.asked == []
    for layer in (1, 3, 4):
        prefetch.issued(routing(layer, np.array([[3, 4]], np.int32)))
    assert reads.asked == [("guess", 3, [5, 6]), ("guess", 4, [2, 1]), ("guess", 4, [2, 1])]
