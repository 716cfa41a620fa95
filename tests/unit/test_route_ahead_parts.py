"""The parts of route-ahead on their own: policy and watchdog."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from support import policies as routings
from support.policies import Reads, model

from routeahead.policies.drop import DropCold
from routeahead.policies.route_ahead import RouteAhead, RouteAheadSettings
from routeahead.prediction.watchdog import WATCH_SLOTS, Watchdog
from routeahead.routing.policy import Ranking
from routeahead.routing.selection import SelectionRule
from routeahead.types import Phase

# --- the policy ---


class Silent:
    """A ranker that knows no router: rankings are offered by hand."""

    def prepare(self) -> None:
        pass

    def __contains__(self, layer: object) -> bool:
        return False


class Ranks:
    """A ranker whose routers all say the same.

    Attributes:
        asked: for which layers, in that order.
        known: agreement by layer, of a calibration.
    """

    convert_s = 0.0

    def __init__(self, ids: list[int], probabilities: list[float]) -> None:
        self.asked: list[int] = []
        self.known: dict[int, float] = {}
        self._ranking = Ranking(np.array(ids, np.int32), np.array(probabilities, np.float32))

    def prepare(self) -> None:
        pass

    def __contains__(self, layer: object) -> bool:
        return True

    def seen(self, layer: int) -> bool:
        return True

    def expected(self, layer: int) -> float | None:
        return self.known.get(layer)

    def rule(self, layer: int) -> SelectionRule:
        return SelectionRule(len(self._ranking.ids), "softmax", weighing="softmax")

    def rank(self, layer: int, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        return self._ranking.ids

    def predict(self, layer: int, hidden: npt.NDArray[np.float32], more: int = 0) -> Ranking:
        self.asked.append(layer)
        return self._ranking

    def best(
        self, layer: int, hidden: npt.NDArray[np.float32], more: int = 0
    ) -> npt.NDArray[np.int32]:
        return self.predict(layer, hidden, more).ids


def reading(
    ids: list[int], shares: list[float], *, drop: DropCold | None = None, held: tuple[int, ...] = ()
) -> tuple[RouteAhead, Reads]:
    """Route-ahead 1 over layers 0, 1 and 2, where every router gives `ids` these shares."""
    probabilities = np.full(32, 1e-3, np.float32)
    probabilities[ids] = shares
    reads, ranker = Reads(held), Ranks(ids, probabilities.tolist())
    policy = RouteAhead(1)
    of = model((0, 1, 2), top_k=len(ids), reads=reads, ranker=lambda precision: ranker)
    of = replace(of, policies=[drop, policy] if drop else [policy])
    policy.bind(of)
    policy.begin("decode", 0)
    return policy, reads


def pass_through(policy: RouteAhead, layer: int, top_k: int) -> None:
    hidden = np.ones((1, 64), np.float32)
    routing = routings.routing(layer, np.arange(top_k, dtype=np.int32)[None], hidden=hidden)
    policy.routed(routing)
    policy.predict(routing)
    policy.issued(routing)


RANKED = [17, 3, 29, 8, 11, 0, 31, 5]
SHARES = [0.4, 0.2, 0.15, 0.1, 0.06, 0.05, 0.03, 0.01]


def test_everything_that_is_predicted_is_read_early_best_first() -> None:
    """There is no cap, and residents are in the list: the cache keeps them until their layer."""
    policy, reads = reading(RANKED, SHARES, held=(29,))
    for layer in (0, 1, 2):
        pass_through(policy, layer, 8)
    assert reads.asked == [("early", 1, RANKED), ("early", 2, RANKED)]
    assert policy.counts.committed == 2


@pytest.mark.parametrize(
    ("share", "aware", "held", "kept"),
    [
        (0.5, True, (), RANKED[:4]),  # below 0.5 / 8 of the mass: dropped if it is not there
        (0.5, True, (31, 9), [*RANKED[:4], 31]),
        (1.0, True, (), RANKED[:3]),
        (1.0, True, tuple(RANKED), RANKED),
        (0.01, True, (), RANKED),
        (1.0, False, (), RANKED),
    ],
)
def test_what_will_be_dropped_is_not_read_early(
    share: float, aware: bool, held: tuple[int, ...], kept: list[int]
) -> None:
    policy, reads = reading(RANKED, SHARES, drop=DropCold(share, aware=aware), held=held)
    pass_through(policy, 0, 8)
    assert reads.asked == [("early", 1, kept)]


def test_the_top_expert_is_read_however_little_it_weighs() -> None:
    policy, reads = reading([4, 9, 2], [0.3, 0.3, 0.3], drop=DropCold(1.0))
    pass_through(policy, 0, 3)
    assert reads.asked == [("early", 1, [4, 9, 2])]


def aiming(least: float, *, skip: int = 0, layers: int = 4) -> tuple[RouteAhead, Reads, Ranks]:
    options = RouteAheadSettings(
        route_ahead=1, route_ahead_min_agreement=least, route_ahead_skip=skip
    )
    reads, ranker = Reads(), Ranks([4, 9], [1 / 32] * 32)
    policy = RouteAhead(1, options=options)
    policy.bind(model(range(layers), reads=reads, ranker=lambda precision: ranker))
    policy.predictions.watchdog.every = 1 << 30
    return policy, reads, ranker


def token(policy: RouteAhead, layers: int, router: list[int]) -> list[bool]:
    """Which layers of a token were committed, whose routers all choose `router`."""
    policy.begin("decode", 0)
    committed = []
    for layer in range(layers):
        hidden = np.ones((1, 64), np.float32)
        routing = routings.routing(layer, np.array([router], np.int32), hidden=hidden)
        policy.routed(routing)
        policy.predict(routing)
        policy.issued(routing)
        committed.append(routing.committed)
    return committed


def test_nothing_is_predicted_from_the_layers_that_are_skipped() -> None:
    policy, reads, ranker = aiming(0, skip=2)
    assert token(policy, 4, [4, 9]) == [False, False, False, True]
    assert ranker.asked == [3] and reads.asked == [("early", 3, [4, 9])]
    assert policy.counts.by_reason["structural"] == 3 and policy.counts.passed_through == 0


def test_a_layer_that_is_known_to_disagree_is_spared() -> None:
    policy, reads, ranker = aiming(0.8)
    ranker.known = {1: 0.79, 2: 0.8}
    assert token(policy, 4, [4, 9]) == [False, False, True, True]
    assert reads.asked == [("guess", 1, [4, 9]), ("early", 2, [4, 9]), ("early", 3, [4, 9])]
    assert policy.counts.by_reason["spared"] == 1 and policy.counts.passed_through == 0


def test_a_layer_that_turns_out_to_disagree_is_spared_until_it_agrees() -> None:
    """Half of the slots agree, which is known after 32 tokens of two slots; then all do."""
    policy, reads, _ = aiming(0.6)
    for number in range(40):
        assert token(policy, 4, [4, 5]) == [False, *[number < 32] * 3]
    assert {kind for kind, *_ in reads.asked[-3:]} == {"guess"}
    counts = policy.counts.by_layer[2]
    assert (counts.slots, counts.agreed_slots) == (80, 40)
    needed = 0
    while not token(policy, 4, [9, 4])[2]:
        needed += 1
    # (40 + 2 n) / (80 + 2 n) is 0.6 at n = 10, and the token after that is committed.
    assert needed == 10


def test_more_depth_than_layers_says_so() -> None:
    policy = RouteAhead(3)
    with pytest.warns(UserWarning, match="route_ahead=3 commits nothing: the model has 3 MoE"):
        policy.bind(model((0, 2, 4), ranker=lambda precision: Silent()))


def test_what_is_not_understood_is_no_first_token() -> None:
    """A target whose rule is not understood is `unranked` even where nothing could be read."""
    policy = route_ahead(0, 1)
    policy.predictions.ranker.seen = lambda layer: True  # type: ignore[method-assign]
    for hidden in (None, np.ones((1, 64), np.float32)):
        policy.begin("decode", 1)
        policy.predict(routings.routing(0, np.array([[1, 2]], np.int32), hidden=hidden))
        routed(policy, 1, [1, 2])
    assert policy.counts.by_reason["unranked"] == 2


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
