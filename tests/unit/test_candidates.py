"""The choice among candidates and cached experts, without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pytest
from support import policies as routings
from support.policies import Reads, model

from routeahead.policies.candidates import choose_among
from routeahead.policies.route_ahead import RouteAhead, RouteAheadSettings
from routeahead.routing.policy import Ranker
from routeahead.routing.selection import SelectionRule
from routeahead.types import Floats, Ids

SCORES = np.array([0.1, 0.9, 0.5, 0.8, 0.3, 0.7], np.float32)
ROUTER = [1, 3, 5]  # the three best of them


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def choose(router: Ids, scores: Floats, candidates: Ids, cached: Callable[[int], bool]) -> Ids:
    return choose_among(router[None], lambda: scores[None], candidates[None], cached)[0]


@pytest.mark.parametrize(
    ("candidates", "cached", "chosen"),
    [
        ([5, 3, 1, 0], (), ROUTER),  # in the router's order
        ([0, 5, 4], (1, 3), ROUTER),
        ([0, 4, 2], (), [2, 4, 0]),
        ([0, 4, 2, 5], (), [5, 2, 4]),
        ([0, 4, 2], (3,), [3, 2, 4]),
        ([0, 4, 2], (1, 5), [1, 5, 2]),
        ([0], (1, 5), [1, 5, 0]),  # fewer are read than are used
        ([0], (2,), [2, 0, 1]),
        ([0], (), [0, 1, 3]),  # the router's best are read on demand
        ([5], (), ROUTER),
    ],
)
def test_the_best_of_what_is_there(
    candidates: list[int], cached: Collection[int], chosen: list[int]
) -> None:
    found = choose(ids(*ROUTER), SCORES, ids(*candidates), lambda e: e in cached)
    assert found.tolist() == chosen and found.dtype == np.int32


def test_each_row_chooses_and_scores_are_read_only_for_those_that_must() -> None:
    asked = []

    def scores() -> Floats:
        asked.append(1)
        return np.stack([SCORES, SCORES])

    router, read = np.array([[1, 3], [3, 1]], np.int32), np.array([[3, 1], [1, 3]], np.int32)
    assert choose_among(router, scores, read, lambda expert: False) is router and not asked
    read[1] = 0, 1
    found = choose_among(router, scores, read, lambda expert: expert == 5)
    assert found.tolist() == [[1, 3], [1, 5]] and asked == [1]
    assert router.tolist() == [[1, 3], [3, 1]]


def test_the_best_predicted_stand_in_for_groups_that_lost() -> None:
    """Of the winning groups' experts only 3 is there, and no score tells the others apart."""
    scores = np.where(np.isin(np.arange(6), [1, 3]), SCORES, -np.inf).astype(np.float32)
    found = choose(ids(1, 3), scores, ids(5, 0, 3, 4), lambda expert: expert == 2)
    assert found.tolist() == [3, 5]
    assert choose(ids(1, 3), scores, ids(), lambda expert: expert == 2).tolist() == [1, 3]


def test_the_experts_of_groups_that_lost_come_last_the_better_first() -> None:
    rule = SelectionRule(2, "sigmoid", groups=3, groups_used=1)
    scores = np.array([0.1, 0.2, 0.9, 0.8, 0.3, 0.4], np.float32)
    assert rule.among_groups(scores).tolist() == [2, 3]
    assert rule.among_groups(scores, 4).tolist() == [2, 3, 5, 4, 1, 0]


def test_the_policy_reads_all_candidates_and_commits_the_routers_best() -> None:
    class Predicts:
        convert_s = 0.0

        def prepare(self) -> None: ...
        def __contains__(self, layer: object) -> bool:
            return True

        def seen(self, layer: int) -> bool:
            return True

        def best(self, layer: int, hidden: object, more: int = 0):  # type: ignore[no-untyped-def]
            return ids(*[0, 4, 2, 3, 1, 5][: 3 + more])

    reads, ranker = Reads(held=(5,)), Predicts()
    options = RouteAheadSettings(route_ahead=1, route_ahead_candidates=1)
    policy = RouteAhead(1, options=options)

    def made(precision: str) -> Ranker:
        return ranker  # type: ignore[return-value]

    policy.bind(model((0, 1), n_expert=6, top_k=3, reads=reads, ranker=made))
    policy.predictions.watchdog.every = 1 << 30
    policy.begin("decode", 0)
    chosen = []
    for layer in (0, 1):
        routing = routings.routing(
            layer, ids(*ROUTER)[None].copy(), n_expert=6, reads=reads,
            scores=lambda: SCORES[None], hidden=np.ones((1, 64), np.float32),
        )  # fmt: skip
        policy.routed(routing)
        policy.predict(routing)
        policy.issued(routing)
        chosen.append((routing.ids.tolist(), routing.committed))
    assert reads.asked == [("early", 1, [0, 4, 2, 3])]
    assert chosen == [([ROUTER], False), ([[3, 5, 2]], True)]
    assert (policy.counts.slots, policy.counts.agreed_slots) == (3, 2)
