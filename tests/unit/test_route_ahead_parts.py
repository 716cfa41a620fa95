"""The parts of route-ahead on their own: policy and watchdog."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.watchdog import WATCH_SLOTS, Watchdog
from routeahead.routing.policy import Routing

# --- the policy ---


def no_scores() -> npt.NDArray[np.float32]:
    raise AssertionError("route-ahead has no use for the router's scores")


def routing(layer: int, *rows: list[int], phase: str = "decode") -> Routing:
    ids = np.array(rows, np.int32)
    return Routing(phase, layer, np.arange(len(rows)), ids, no_scores, lambda *_: False)  # type: ignore[arg-type]


def ids(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def test_commits_in_place_and_counts_agreement() -> None:
    policy = RouteAhead([2, 5, 7], 1, Watchdog(3))
    policy.begin()
    assert policy.offer(policy.serial, 1, ids(4, 1, 9))
    first, second = routing(2, [1, 2, 3]), routing(5, [1, 2, 9])
    assert not policy.commit(first) and policy.commit(second)
    assert first.ids.tolist() == [[1, 2, 3]] and second.ids.tolist() == [[4, 1, 9]]
    counts = policy.counts
    assert (counts.committed, counts.slots, counts.agreed_slots) == (1, 3, 2)
    assert counts.by_layer[5].agreed_slots == 2 and counts.by_layer[2].slots == 0
    assert counts.by_reason["structural"] == 1


def test_a_stale_ranking_is_never_committed() -> None:
    policy = RouteAhead([0, 1], 1, Watchdog(2))
    policy.begin()
    serial = policy.serial
    assert policy.offer(serial, 1, ids(5, 6))
    policy.begin()  # the token was abandoned, say
    asked = routing(1, [1, 2])
    assert not policy.commit(asked) and asked.ids.tolist() == [[1, 2]]
    assert not policy.offer(serial, 1, ids(5, 6))
    assert not policy.commit(routing(1, [1, 2]))
    assert policy.offer(policy.serial, 1, ids(5, 6)) and policy.commit(routing(1, [1, 2]))
    assert not policy.commit(routing(1, [1, 2]))  # nor is one committed twice
    assert policy.counts.by_reason["late"] == 3


def test_reasons() -> None:
    watchdog = Watchdog(2)
    policy = RouteAhead([0, 1], 1, watchdog)
    policy.begin()
    policy.commit(routing(1, [1, 2], phase="prefill"))
    policy.commit(routing(1, [1, 2], [3, 4]))
    policy.cannot_predict(1, "unreadable")
    policy.commit(routing(1, [1, 2]))
    policy.begin()
    policy.cannot_predict(1, "first_token")
    policy.commit(routing(1, [1, 2]))
    policy.begin()
    policy.offer(policy.serial, 1, ids(8, 9))
    watchdog.disarmed = "because"
    policy.commit(routing(1, [1, 2]))
    counted = {why: n for why, n in policy.counts.by_reason.items() if n}
    assert counted == dict.fromkeys(
        ("prefill", "several_rows", "unreadable", "first_token", "disarmed"), 1
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
