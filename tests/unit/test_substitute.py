"""When an expert that is in memory takes the place of one that is not."""

from __future__ import annotations

import numpy as np
from support.policies import Reads, routing

from routeahead.policies.substitute import Substitute


def substituted(
    ids: list[int], scores: list[float], resident: set[int], margin: float
) -> tuple[list[int], int]:
    row = np.array([ids], np.int32)
    policy = Substitute(margin)
    ranked = np.array([scores], np.float32)
    policy.routed(routing(0, row, reads=Reads(resident), scores=lambda: ranked))
    return row[0].tolist(), policy.substituted


def test_a_near_tie_goes_to_the_resident_expert() -> None:
    scores = [0.0, 1.0, 0.9, 0.5, 0.45]
    assert substituted([1, 2, 3], scores, {4}, 0.04) == ([1, 2, 3], 0)
    assert substituted([1, 2, 3], scores, {4}, 0.06) == ([1, 2, 4], 1)
    assert substituted([1, 2, 3], scores, {4, 3}, 0.06) == ([1, 2, 3], 0)
    assert substituted([1, 2, 3], scores, {0, 4}, 1.0) == ([4, 0, 1], 2)  # equals: the lower id
    lost = [-np.inf, 1.0, 0.9, 0.5, 0.45]  # a group that is out stays out
    assert substituted([1, 2, 3], lost, {0}, 1.0) == ([1, 2, 3], 0)
