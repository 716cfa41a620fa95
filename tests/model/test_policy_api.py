"""A policy of one's own: what it is shown, what it may do, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import models
from support.library import PROMPTS, Library, evaluate, with_budget

from routeahead import Llama, Model, Policy, PolicyError, Routing, Settings, SettingsError
from routeahead.types import Phase

Load = Callable[..., Llama]
NAME = "qwen3moe"


class Watching(Policy):
    """Wants everything and changes nothing; checks the shapes of what it is shown."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hidden = 0

    def bind(self, model: Model) -> None:
        self.model = model

    def wants_hidden(self, phase: Phase) -> bool:
        return True

    def wants_weights(self, phase: Phase) -> bool:
        return True

    def begin(self, phase: Phase, position: int) -> None:
        self.calls.append("begin")

    def routed(self, routing: Routing) -> None:
        self.calls.append("routed")
        rows, n_expert = len(routing.ids), self.model.n_expert
        assert routing.layer in self.model.layers and routing.positions.shape == (rows,)
        assert routing.ids.dtype == np.int32 and routing.ids.shape == (rows, self.model.top_k)
        assert routing.scores().shape == (rows, n_expert)
        assert routing.weights is None and not routing.committed
        if routing.hidden is not None:
            self.hidden += 1
            assert routing.hidden.dtype == np.float32
            assert routing.hidden.shape == (len(routing.ids), self.model.width)
            with pytest.raises(ValueError, match="read-only"):
                routing.hidden[:] = 0
        with pytest.raises(ValueError, match="read-only"):
            routing.ids[:] = 0
        with pytest.raises(PolicyError, match="in `weighted` only"):
            routing.drop(np.zeros(routing.ids.shape, np.bool_))

    def predict(self, routing: Routing) -> None:
        self.calls.append("predict")

    def weighted(self, routing: Routing) -> None:
        self.calls.append("weighted")
        assert routing.hidden is None and routing.weights is not None
        assert routing.weights.shape == routing.ids.shape
        assert (routing.weights > 0).all()

    def issued(self, routing: Routing) -> None:
        self.calls.append("issued")

    def product(self, layer: int) -> None:
        self.calls.append("product")

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "gemma4", "deepseek2-grouped"])
def test_a_watcher_changes_nothing_and_sees_all(load: Load, library: Library, name: str) -> None:
    watcher = Watching()
    llm = with_budget(load, name, 0.2, policies=[watcher], poison=True)
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    layers, batches = len(llm.layout.moe_layers), sum(map(len, PROMPTS))
    counts = {call: watcher.calls.count(call) for call in set(watcher.calls)}
    assert counts["begin"] == counts["end"] == batches
    assert counts["routed"] == counts["predict"] == counts["issued"] == layers * batches
    # The first graph shows where a layer's weights are final: until then nobody waits for them.
    assert layers * (batches - 1) <= counts["weighted"] <= layers * batches
    assert counts["product"] > 0
    assert watcher.hidden >= layers * (batches - len(PROMPTS) - 1)
    order = watcher.calls[watcher.calls.index("end") + 1 :]
    assert order[:5] == ["begin", "routed", "predict", "weighted", "issued"]


class Choosing(Policy):
    """Chooses what it is told to, in decode."""

    def __init__(self, ids: Any, row: int | None = 0) -> None:
        self.ids, self.row = ids, row

    def routed(self, routing: Routing) -> None:
        if routing.phase == "decode":
            routing.choose(self.ids, self.row)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([0, 1, 2, 16], r"layer 0: a policy chose expert 16, and there are 16: give 0 to 15"),
        ([0, 1, 2, -1], "expert -1"),
        ([0, 1, 2, 1 << 40], f"expert {1 << 40}"),
        ([0, 1, 2], r"int64 \(3,\): give integers \(4,\)"),
        ([0.0, 1.0, 2.0, 3.0], r"float64"),
        ([[0, 1, 2, 3]], r"\(1, 4\)"),
    ],
)
def test_ids_that_are_none_are_refused(load: Load, library: Library, ids: Any, reason: str) -> None:
    """llama.cpp would end the process; here the batch is undone and the model goes on."""
    choosing = Choosing(ids)
    llm = load(NAME, cache_mb=8, policies=[choosing])
    with pytest.raises(PolicyError, match=reason):
        evaluate(llm, PROMPTS[0])
    assert llm.n_tokens == len(PROMPTS[0][0])
    choosing.routed = lambda routing: None  # type: ignore[method-assign]
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


def test_chosen_experts_are_computed_with(load: Load, library: Library) -> None:
    outputs = [
        evaluate(with_budget(load, NAME, share, policies=[Choosing([3, 1, 2, 0])]), PROMPTS[0])
        for share in (0.1, 1.0)
    ]
    np.testing.assert_array_equal(*outputs)
    assert not np.array_equal(outputs[0], library.resident(NAME)[0])


class Dropping(Policy):
    def __init__(self, slots: list[bool]) -> None:
        self.slots = np.array([slots])

    def wants_weights(self, phase: Phase) -> bool:
        return phase == "decode"

    def weighted(self, routing: Routing) -> None:
        routing.drop(self.slots)


@pytest.mark.parametrize(
    ("slots", "reason"), [([True] * 4, "leave each row an expert"), ([True], r"booleans \(1, 4\)")]
)
def test_drops_that_are_none_are_refused(load: Load, slots: list[bool], reason: str) -> None:
    llm = load(NAME, cache_mb=8, policies=[Dropping(slots)])
    with pytest.raises(PolicyError, match=reason):
        evaluate(llm, PROMPTS[0])


def test_what_was_dropped_is_not_read(load: Load) -> None:
    plain = load(NAME, cache_mb=0)
    dropping = load(NAME, cache_mb=0, policies=[Dropping([False, False, True, True])])
    for llm in (plain, dropping):
        assert np.isfinite(evaluate(llm, PROMPTS[0])).all()
    whole, half = (llm.counters.decode for llm in (plain, dropping))
    assert half.misses == whole.misses // 2


class Fault(Exception):
    pass


HOOKS = ("begin", "routed", "predict", "weighted", "issued", "product", "end")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_hook_that_raises(
    load: Load, library: Library, hook: str, error: type[BaseException]
) -> None:
    """The exception ends the generation, and the model is as usable as before."""
    policy = Watching()
    llm = with_budget(load, NAME, 0.2, policies=[policy], poison=True)
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    llm.phase = "decode"
    llm.eval(tokens[0])
    original, calls = getattr(policy, hook), 0

    def faulty(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if hook in ("begin", "end") else 3):
            raise error
        original(*arguments)

    setattr(policy, hook, faulty)
    with pytest.raises(error):
        llm.eval(tokens[1])
    assert llm.n_tokens == len(prompt) + 1
    setattr(policy, hook, original)
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


def test_a_generation_ends_with_the_hooks_exception(load: Load) -> None:
    class Failing(Watching):
        def routed(self, routing: Routing) -> None:
            if routing.positions[0] >= 16:
                raise Fault("at 16")

    llm = load(NAME, cache_mb=8, policies=[Failing()])
    with pytest.raises(Fault, match="at 16"):
        for _ in llm.create_completion("0123456789", max_tokens=30, stream=True):
            pass


def test_early_reads_of_a_policy(load: Load, library: Library) -> None:
    """Right, wrong and repeated ones: the output is the resident one."""

    class Reading(Policy):
        reads_early = "all"

        def bind(self, model: Model) -> None:
            self.model = model

        def issued(self, routing: Routing) -> None:
            for layer in self.model.after(routing.layer, 2):
                self.model.experts.guess(layer, range(self.model.n_expert), 5)

    llm = with_budget(load, NAME, 0.1, policies=[Reading()], poison=True)
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    assert llm.source and 0 < llm.source.prefetch.useful < llm.source.prefetch.issued
    assert llm.policies.reads_early == "all"


def test_a_resident_model_has_no_policies(load: Load) -> None:
    with pytest.raises(SettingsError, match="not with resident"):
        load(NAME, resident=True, policies=[Watching()])
    with pytest.raises(SettingsError, match="resident streams nothing"):
        load(NAME, resident=True, policy=("a:B",))


# --- keywords ---


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ({"cache_mbb": 4000}, "'cache_mbb'; did you mean cache_mb?"),
        ({"n_ctxx": 8}, "'n_ctxx'; did you mean n_ctx?"),
        ({"zzz": 1}, "'zzz'$"),
    ],
)
def test_unknown_keywords_name_the_nearest(library: Library, keyword: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        Llama(library.path(NAME), **keyword)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"route_ahead": 1.5}, "route_ahead is 1.5: give a whole number"),
        ({"n_expert_used": 2.0}, "n_expert_used is 2.0: give a whole number or None"),
        ({"overlap": 1}, "overlap is 1: give True or False"),
        ({"cache_mb": "4G"}, "cache_mb is '4G': give a whole number or 'auto'"),
        ({"io_threads": True}, "io_threads is True: give a whole number"),
        ({"replay_routing": 3}, "replay_routing is 3: give a path or None"),
        ({"policy": "a:B"}, "policy is 'a:B': give a sequence of texts"),
        ({"throttle": float("nan")}, "throttle is nan: it cannot be negative"),
    ],
)
def test_values_of_another_type_are_refused(
    library: Library, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        Llama(library.path(NAME), **settings)


def test_a_file_may_be_given_as_text() -> None:
    settings, rest = Settings.split({"replay_routing": "a/b.csv", "n_ctx": 5})
    assert settings.replay_routing == Path("a/b.csv") and rest == {"n_ctx": 5}


def test_capping_the_context_needs_no_context(library: Library) -> None:
    llm = Llama(library.path(NAME), cap_context=True, cache_mb=0, n_threads=1)
    assert llm.n_ctx() == models.CONTEXT_LENGTH
    llm.close()
