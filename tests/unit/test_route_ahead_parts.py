"""The parts of route-ahead on their own: selection rule, gates, policy, cache, lanes."""

from __future__ import annotations

import ctypes
import threading

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from routeahead import SettingsError
from routeahead.experts.cache import ExpertCache
from routeahead.experts.lanes import Kind, Lanes, Read, Slice, Ticket
from routeahead.experts.layout import BLOCK, ExpertTensor
from routeahead.experts.slots import Slots
from routeahead.llamacpp import ggml
from routeahead.llamacpp.router_product import Gate, Precision
from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.watchdog import WATCH_SLOTS, Watchdog
from routeahead.routing.policy import Routing
from routeahead.routing.selection import SelectionRule

# --- the selection rule ---


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def test_ranks_by_logit_and_takes_the_lower_id_of_equals() -> None:
    rule = SelectionRule(3, "softmax")
    assert rule.select(floats(1, 5, 5, -2, 5)).tolist() == [1, 2, 4]
    assert rule.select(floats(1, 5, 5, -2, 5)).dtype == np.int32


def test_gate_bias_comes_before_the_activation_and_selection_bias_after() -> None:
    logits, bias = floats(0, 1, 2, 3), floats(0, 0, 0.6, 0)
    # Sigmoid squeezes: 0.6 more than sigmoid(2) is above sigmoid(3), and 0.6 more than 2 is not.
    assert SelectionRule(2, "sigmoid", selection_bias=bias).select(logits).tolist() == [2, 3]
    assert SelectionRule(2, "sigmoid", gate_bias=bias).select(logits).tolist() == [3, 2]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "sqrt_softplus", "none"])
def test_scores_with_a_selection_bias(activation: str) -> None:
    logits = np.linspace(-8, 9, 8).astype(np.float32)
    bias = np.linspace(0.5, -0.5, 8).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = {
        "softmax": np.exp(wide) / np.exp(wide).sum(),
        "sigmoid": 1 / (1 + np.exp(-wide)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(wide))),
        "none": wide,
    }[activation]
    rule = SelectionRule(2, activation, selection_bias=bias)  # type: ignore[arg-type]
    np.testing.assert_allclose(rule.scores(logits), expected + bias, rtol=1e-6, atol=1e-6)


def test_groups_compete_by_their_two_best() -> None:
    logits = floats(9, -9, -9, -9, 2, 2, -9, -9, 1.5, 1.5, -9, -9)
    rule = SelectionRule(3, "none", groups=3, groups_used=1)
    assert rule.select(logits).tolist()[:2] == [4, 5]  # 2 + 2 beats 9 - 9 and 1.5 + 1.5
    assert np.isneginf(rule.scores(logits)[[0, 8, 9]]).all()


def test_extreme_logits_are_no_warning() -> None:
    rule = SelectionRule(1, "sigmoid", selection_bias=floats(0, 0))
    with np.errstate(all="raise", under="ignore", over="raise"):
        assert rule.select(floats(-1000, 3)).tolist() == [1]


# --- gates ---


def matrix(kind: str, values: npt.NDArray[np.float32]) -> tuple[ggml.Tensor, npt.NDArray[np.uint8]]:
    """A tensor struct over `values` stored as `kind`, and its memory."""
    number = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values, number)
    tensor = ggml.Tensor()
    tensor.type, tensor.data = int(number), stored.ctypes.data
    tensor.ne[:] = [values.shape[1], values.shape[0], 1, 1]
    return tensor, stored


@pytest.mark.parametrize("precision", ["f32", "f16", "int8"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_gate_is_the_product(kind: str, precision: Precision) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((24, 96), dtype=np.float32)
    row = rng.standard_normal(96, dtype=np.float32)
    tensor, stored = matrix(kind, values)
    gate = Gate(tensor, precision)
    exact = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).reshape(24, 96)
    expected = exact.astype(np.float64) @ row.astype(np.float64)
    coarse = precision == "int8" or kind == "Q8_0"  # the row is rounded to 8 bits as well
    tolerance = 0.25 if coarse else 0.05 if "F16" in kind + precision.upper() else 1e-5
    for _ in range(3):  # buffers are reused
        np.testing.assert_allclose(gate.logits(row), expected, atol=tolerance)
        np.testing.assert_allclose(gate.logits(-row), -expected, atol=tolerance)


def test_gate_in_float32_uses_the_models_memory() -> None:
    values = np.zeros((8, 64), np.float32)
    tensor, stored = matrix("F32", values)
    gate = Gate(tensor, "f32")
    weights = np.ndarray(values.shape, np.float32, stored)
    weights[5] = 1
    assert gate.logits(np.ones(64, np.float32)).tolist() == [0, 0, 0, 0, 0, 64, 0, 0]


def test_int8_needs_whole_blocks() -> None:
    tensor, _stored = matrix("F32", np.zeros((8, 40), np.float32))
    with pytest.raises(SettingsError, match="multiple of 32 numbers, and this model's have 40"):
        Gate(tensor, "int8")


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


# --- the cache ---


def test_early_experts_stay_until_the_batch_after_theirs() -> None:
    cache = ExpertCache(4, {0: 1, 1: 1, 2: 1})
    cache.lookup(1, [0, 1])
    cache.lookup(0, [0, 1])
    assert cache.admit_early(1, [0, 7]) == [7]  # 0 is resident and protected, 7 is read
    assert (cache.misses, cache.used, cache.protected) == (5, 5, 2)
    assert not cache.would_hit(1, 7) and cache.would_hit(1, 0)
    assert cache.lookup(0, [5, 6]).victims == [(1, 1), (0, 0)]  # not (1, 0), though it is older
    outcome = cache.lookup(1, [0, 7])
    assert outcome.misses == [] and outcome.victims == [(0, 1)]
    assert (cache.hits, cache.misses, cache.used) == (1, 7, 4)
    assert cache.protected == 2
    cache.lookup(2, [0, 1])
    assert cache.protected == 0 and cache.used == 4


def test_nothing_is_evicted_for_early_experts_before_their_layer() -> None:
    cache = ExpertCache(2, {0: 1, 1: 1})
    cache.lookup(0, [0, 1])
    assert cache.admit_early(1, [0, 1]) == [0, 1] and cache.used == 4
    assert cache.lookup(0, [0, 1]).victims == []
    assert cache.lookup(1, [0, 1]).victims == [(0, 0), (0, 1)]


def test_unused_early_experts_become_ordinary() -> None:
    cache = ExpertCache(2, {0: 1, 1: 1})
    cache.admit_early(1, [0, 1])
    assert cache.lookup(1, [2, 3]).victims == []  # 0 and 1 may still be on their way
    assert cache.lookup(0, [4]).victims[:2] == [(1, 0), (1, 1)]
    cache.admit_early(1, [5])
    cache.release()
    assert cache.protected == 0
    cache.lookup(0, [4])
    assert cache.used <= 2


# --- lanes ---


class Gated:
    """Lets reads through one by one, and remembers their order."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        self.order.append(offset // BLOCK)
        self.begun.release()
        self.allowed.acquire()
        return need

    def close(self) -> None:
        pass


def reads(layer: int, *offsets: int, kind: Kind = "demand") -> tuple[list[Read], Ticket]:
    tensor = ExpertTensor("t", layer, "up", "F32", 8, 0, 0, BLOCK)
    ticket = Ticket(len(offsets))
    slots = Slots([tensor])
    (pool,) = slots.share_out([[layer]])
    slices = [Slice(slots.places[layer][0], o, pool, 0) for o in offsets]
    return [Read(one, ticket, kind) for one in slices], ticket


def test_demand_goes_first_and_a_layer_adopts_its_own() -> None:
    reader = Gated()
    lanes = Lanes(1, reader, Slots([]))
    (of_five, five), (of_six, six) = (
        reads(5, 1, 2, 3, kind="committed"),
        reads(6, 4, kind="committed"),
    )
    lanes.submit(of_five, "committed")
    lanes.submit(of_six, "committed")
    reader.begun.acquire()  # 1 is in flight
    demand, needed = reads(4, 9)
    lanes.submit(demand)
    adopted = lanes.adopt(5)
    assert [read.slice.expert for read in adopted] == [2, 3]
    assert lanes.adopt(5) == []
    lanes.submit(adopted)
    for _ in range(5):
        reader.allowed.release()
    for ticket in (five, six, needed):
        ticket.wait()
    assert reader.order == [1, 9, 2, 3, 4]
    assert lanes.early_bytes == 4 * BLOCK and lanes.bytes_read == 5 * BLOCK
    lanes.close()


def test_drain_waits_for_what_is_in_flight_and_cancels_the_rest() -> None:
    reader = Gated()
    lanes = Lanes(2, reader, Slots([]))
    queued, ticket = reads(5, 1, 2, 3, 4, kind="committed")
    lanes.submit(queued, "committed")
    for _ in range(2):
        reader.begun.acquire()
    drained = threading.Thread(target=lanes.drain)
    drained.start()
    drained.join(0.05)
    assert drained.is_alive() and not ticket.done
    for _ in range(2):
        reader.allowed.release()
    drained.join()
    assert ticket.done and ticket.error and sorted(reader.order) == [1, 2]
    more, later = reads(6, 7)
    reader.allowed.release()
    lanes.submit(more)
    later.wait()
    lanes.close()


def test_struct_of_a_plan_is_what_ggml_fills_in() -> None:
    """A wrong layout would show as a thread count that is not the one asked for."""
    base = ggml.compute_library()
    context = ggml.new_context(8192 + base.ggml_graph_overhead_custom(8, False))
    try:
        a, b = (base.ggml_new_tensor_2d(context, 0, 32, rows) for rows in (4, 1))
        graph = base.ggml_new_graph_custom(context, 8, False)
        base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, a, b))
        plan = base.ggml_graph_plan(graph, 1, None)
        assert (plan.n_threads, plan.work_data, plan.threadpool) == (1, None, None)
        assert plan.work_size < 1 << 20 and ctypes.sizeof(plan) == 56
    finally:
        base.ggml_free(context)
