"""The parts of route-ahead on their own: policy and watchdog."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from support import policies as routings
from support.policies import model

from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.watchdog import WATCH_SLOTS, Watchdog
from routeahead.types import Phase

# --- the policy ---


class Silent:
    """A ranker that knows no router: rankings are offered by hand."""

    def prepare(self) -> None:
        pass

    def __contains__(self, layer: object) -> bool:
        return False


def route_ahead(*layers: int) -> RouteAhead:
    policy = RouteAhead(1)
    policy.bind(model(layers, ranker=lambda precision: Silent()))
    policy.begin("decode", 0)
    return policy


def routed(policy: RouteAhead, layer: int, *rows: list[int], phase: Phase = "decode") -> list:
    """What became of a routing, and whether it was committed."""
    routing = routings.routing(layer, np.array(rows, np.int32), phase=phase)
    policy.routed(routing)
    return [routing.ids.tolist(), routing.committed]


def ids(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def rows(*values: int) -> npt.NDArray[np.int32]:
    return ids(*values)[None]


def test_commits_in_place_and_counts_agreement() -> None:
    policy = route_ahead(2, 5, 7)
    assert policy.offer(policy.serial, 5, rows(4, 1, 9))
    assert routed(policy, 2, [1, 2, 3]) == [[[1, 2, 3]], False]
    assert routed(policy, 5, [1, 2, 9]) == [[[4, 1, 9]], True]
    counts = policy.counts
    assert (counts.committed, counts.slots, counts.agreed_slots) == (1, 3, 2)
    assert counts.by_layer[5].agreed_slots == 2 and counts.by_layer[2].slots == 0
    assert counts.by_reason["structural"] == 1


def test_commits_each_row() -> None:
    policy = route_ahead(0, 1)
    assert policy.offer(policy.serial, 1, np.stack([ids(4, 1), ids(3, 9)]))
    assert routed(policy, 1, [1, 2], [3, 9]) == [[[4, 1], [3, 9]], True]
    counts = policy.counts
    assert (counts.committed, counts.slots, counts.agreed_slots) == (1, 4, 3)


def test_a_stale_ranking_is_never_committed() -> None:
    policy = route_ahead(0, 1)
    serial = policy.serial
    assert policy.offer(serial, 1, rows(5, 6))
    policy.begin("decode", 1)  # the token was abandoned, say
    assert routed(policy, 1, [1, 2]) == [[[1, 2]], False]
    assert not policy.offer(serial, 1, rows(5, 6))
    assert not routed(policy, 1, [1, 2])[1]
    assert policy.offer(policy.serial, 1, rows(5, 6)) and routed(policy, 1, [1, 2])[1]
    assert not routed(policy, 1, [1, 2])[1]  # nor is one committed twice
    assert policy.counts.by_reason["late"] == 3


def test_reasons() -> None:
    policy = route_ahead(0, 1)
    routed(policy, 1, [1, 2], phase="prefill")
    policy.offer(policy.serial, 1, np.stack([ids(1, 2), ids(3, 4)]))
    routed(policy, 1, [1, 2])
    policy.cannot_predict(1, "unreadable")
    routed(policy, 1, [1, 2])
    policy.begin("decode", 1)
    policy.cannot_predict(1, "first_token")
    routed(policy, 1, [1, 2])
    policy.begin("decode", 2)
    policy.offer(policy.serial, 1, rows(8, 9))
    policy.predictions.watchdog.disarmed = "because"
    routed(policy, 1, [1, 2])
    counted = {why: n for why, n in policy.counts.by_reason.items() if n}
    assert counted == dict.fromkeys(
        ("prefill", "fewer_rows", "unreadable", "first_token", "disarmed"), 1
    )
    assert policy.counts.passed_through == 4


@pytest.mark.parametrize(("wrong", "disarms"), [(6, False), (7, True)])
def test_verdict_at_ninety_percent(wrong: int, disarms: bool) -> None:
    watchdog = Watchdog(1)
    verdicts = []
    for number in range(WATCH_SLOTS // 2):
        verdicts.append(watchdog.watch(ids(1, 2), ids(2, 9) if number < wrong else ids(2, 1)))
    assert not any(verdicts[:-1]) and bool(verdicts[-1]) == disarms
    assert watchdog.armed != disarms


def test_every_layer_gets_watched() -> None:
    for layers in (6, 17, 34, 48):
        watchdog = Watchdog(layers)
        seen = {n % layers for n in range(layers * watchdog.every) if watchdog.wants()}
        assert len(seen) == layers
