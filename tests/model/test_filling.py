"""Idle lanes fill the cache: the same logits, nobody waits for it, nothing is read twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import models
from support.library import PROMPTS, Library, evaluate
from support.processes import in_child
from support.readers import Delayed, Failing, Unruly, disk_error, interrupt

from routeahead import Llama, SettingsError
from routeahead.cli.open_model import open_model
from routeahead.config import Settings
from routeahead.engine.profile import profile_path, read_uses
from routeahead.experts.reader import Reader
from routeahead.setting import facts_of

Load = Callable[..., Llama]
NAME = "qwen3moe"


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "routeahead" / "profiles"


def filled(load: Load, name: str, share: float, **settings: object) -> Llama:
    """A model whose cache is being filled; it holds that share of the experts."""
    llm = load(name, cache_mb=64, force_cache=True, fill_cache=True, **settings)
    assert llm.source
    if share < 1:
        llm.source.cache.budget = int(llm.layout.expert_bytes * share)
        llm.source.begin()
    return llm


def wait_for_filling(llm: Llama) -> None:
    """Until no idle read is left, which must not need the evaluation thread."""
    assert llm.source
    deadline = time.monotonic() + 30
    while llm.source.lanes.idle_queued and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not llm.source.lanes.idle_queued


def check(llm: Llama, library: Library, name: str = NAME) -> None:
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("name", models.FIXTURES)
def test_filling_changes_nothing(load: Load, library: Library, name: str) -> None:
    """Delayed and reordered reads while tokens are computed, an unread page is a crash."""
    for share in (1.0, 0.4, 0.1):
        llm = filled(load, name, share, poison=True, wrap_reader=Delayed)
        check(llm, library, name)
        assert llm.source and llm.source.filling
        counts = llm.source.filling.counts
        assert counts.issued > 0 and counts.useful <= counts.completed <= counts.issued
        assert llm.source.cache.used <= llm.source.cache.budget + llm.layout.layer_bytes()
        llm.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    "settings",
    [
        {"route_ahead": 2},
        {"prefetch": 3},
        {"predict_prefetch": True, "predict_spec_max": 99},
        {"cache_policy": "decay"},
        {"io_threads": 1},
        {"io_threads": 5, "overlap": False},
        {"cache_mb": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_beside_everything_else(load: Load, settings: dict[str, object], share: float) -> None:
    """What is read early or guessed, and what idle lanes read, never have an expert at once."""
    logits = []
    for fill in (False, True):
        llm = load(NAME, **{
            "cache_mb": 64, "fill_cache": fill, "poison": True, "wrap_reader": Delayed, **settings,
        })  # fmt: skip
        assert llm.source
        if llm.source.cache.budget and share < 1:
            llm.source.cache.budget = int(llm.layout.expert_bytes * share)
        logits.append([evaluate(llm, batches) for batches in PROMPTS])
        llm.close()
    for plain, with_filling in zip(*logits, strict=True):
        np.testing.assert_array_equal(plain, with_filling)


@pytest.mark.fast
def test_where_all_fits_nothing_is_missing_after_a_pause(load: Load, library: Library) -> None:
    llm = filled(load, NAME, 1.0, poison=True)
    wait_for_filling(llm)
    time.sleep(0.05)  # the last read ends
    check(llm, library)
    source = llm.source
    assert source and source.filling
    assert source.cache.misses == 0 and source.cache.hits > 0
    assert source.lanes.idle_bytes == source.lanes.bytes_read
    counts, experts = source.filling.counts, sum(e.n_expert for e in llm.layout.experts) // 3
    assert counts.issued == counts.completed == experts >= counts.useful > experts // 2


class Watched:
    """Notes each read; holds those up that are not allowed."""

    def __init__(self, inner: Reader) -> None:
        self.inner, self.close = inner, inner.close
        self.offsets: Counter[tuple[int, int]] = Counter()
        self.allowed = threading.Event()
        self.allowed.set()

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        self.allowed.wait()
        self.offsets[shard, offset] += 1
        return self.inner.read(shard, offset, view, need)


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_no_expert_is_read_twice(load: Load, library: Library, pause: float) -> None:
    """All fit: a layer takes back what no lane has begun, and waits for what one has. No prompt,
    for which layers' experts are read ahead, used or not."""
    readers: list[Watched] = []

    def watched(inner: Reader) -> Reader:
        readers.append(Watched(inner))
        return readers[-1]

    llm = filled(load, NAME, 1.0, wrap_reader=watched)
    time.sleep(pause)
    with llm.decoding():
        for (token,) in PROMPTS[0][1:]:
            llm.eval([token])
    wait_for_filling(llm)
    llm.close()
    dense = {offset for (_, offset), _ in readers[0].offsets.items()}
    assert dense and max(readers[0].offsets.values()) == 1


def test_what_layers_ask_for_takes_the_room_of_what_is_least_likely(
    load: Load, library: Library
) -> None:
    """Lanes stand still until the first prompt has been asked for: nothing is evicted for filling,
    and the cache is within its budget."""
    readers: list[Watched] = []

    def watched(inner: Reader) -> Reader:
        readers.append(Watched(inner))
        return readers[-1]

    llm = filled(load, NAME, 0.5, wrap_reader=watched)
    wait_for_filling(llm)
    source = llm.source
    assert source and source.filling
    assert source.filling.counts.issued * 3 >= source.lanes.reads > 0
    plain = load(NAME, cache_mb=64, force_cache=True)
    assert plain.source
    plain.source.cache.budget = source.cache.budget
    for model in (llm, plain):
        check(model, library)
    assert source.cache.misses <= plain.source.cache.misses
    assert source.cache.used <= source.cache.budget


@pytest.mark.fast
def test_an_idle_read_that_fails_is_nobodys_fault(load: Load, library: Library) -> None:
    """It is read again when its layer asks."""
    readers: list[Failing] = []

    def failing(inner: Reader) -> Reader:
        readers.append(Failing(inner, lambda number: number % 3 == 0, disk_error))
        return readers[-1]

    llm = filled(load, NAME, 1.0, wrap_reader=failing, poison=True)
    llm.source.recover()  # type: ignore[union-attr]
    readers[0].armed = True
    llm.source.begin()  # type: ignore[union-attr]
    wait_for_filling(llm)
    time.sleep(0.05)
    readers[0].armed = False
    check(llm, library)
    assert llm.source and llm.source.filling
    counts = llm.source.filling.counts
    assert llm.source.cache.misses > 0 and counts.completed < counts.issued


@pytest.mark.parametrize("fault", [disk_error, interrupt], ids=["read", "ctrl-c"])
def test_faults_while_filling(load: Load, library: Library, fault: Callable[[], int]) -> None:
    """Whatever a fault hits, a demand read or an idle one: the next run is right."""
    readers: list[Unruly] = []

    def unruly(inner: Reader) -> Reader:
        readers.append(Unruly(inner))
        return readers[-1]

    llm = filled(load, NAME, 0.6, wrap_reader=unruly)
    (reader,) = readers
    raised = 0
    for strike in range(1, 60, 4):
        reader.schedule(strike)
        assert llm.source
        try:
            llm.source.recover()
            reader.strike(strike, fault)
            evaluate(llm, PROMPTS[0])
        except (Exception, KeyboardInterrupt):
            raised += 1
        reader.strike(0, fault)
        np.testing.assert_array_equal(evaluate(llm, PROMPTS[1]), library.resident(NAME)[1])
    assert raised > 3


@pytest.mark.fast
def test_close_and_fork_while_filling(load: Load, library: Library, cache_folder: Path) -> None:
    """Neither waits for the plan. A child writes no profile."""

    class Slow:
        def __init__(self, inner: Reader) -> None:
            self.inner, self.close, self.reads = inner, inner.close, 0
            self.slow = False

        def read(self, *arguments: object) -> int:
            if self.slow:
                time.sleep(0.05)
            return self.inner.read(*arguments)  # type: ignore[arg-type]

    readers: list[Slow] = []

    def slow(inner: Reader) -> Reader:
        readers.append(Slow(inner))
        return readers[-1]

    llm = filled(load, NAME, 1.0, wrap_reader=slow)
    evaluate(llm, PROMPTS[1])
    readers[0].slow = True
    assert llm.source
    llm.source.recover()
    llm.source.begin()
    status, said = in_child(llm.close)
    assert (status, said) == (0, "None")
    assert not cache_folder.exists()
    assert llm.source.lanes.idle_queued > 20
    started = time.monotonic()
    llm.close()
    assert time.monotonic() - started < 1
    assert len(list(cache_folder.glob("*.json"))) == 1 == len(list(cache_folder.iterdir()))


def test_resizes_while_filling(load: Load, library: Library) -> None:
    """Smaller, larger, whole, and back, between batches: the budget holds, the bytes are right."""
    llm = filled(load, NAME, 0.7, poison=True, wrap_reader=Delayed)
    source, whole = llm.source, llm.layout.expert_bytes
    assert source and source.filling
    for share in (0.3, 0.8, 0.2, 0.5, 1.0, 0.6):
        source.resize(int(whole * share))
        assert source.cache.used <= source.cache.budget
        np.testing.assert_array_equal(evaluate(llm, PROMPTS[1]), library.resident(NAME)[1])
        time.sleep(0.01)
    source.resize(int(whole * 0.4))
    source.begin()
    wait_for_filling(llm)
    time.sleep(0.05)
    source.begin()
    size = max(llm.layout.bytes_by_layer().values())
    parts = len(source.cache.parts)
    assert source.cache.budget - parts * size < source.cache.used <= source.cache.budget
    assert source.filling.planned == 0


@pytest.mark.fast
def test_filling_ends_when_memory_is_short_and_goes_on(load: Load) -> None:
    llm = load(NAME, cache_mb=64, fill_cache=True, wrap_reader=Delayed)
    source = llm.source
    assert source
    source.lanes.pause()
    time.sleep(0.02)
    left, read = source.lanes.idle_queued, source.lanes.idle_bytes
    time.sleep(0.05)
    assert source.lanes.idle_queued == left > 0 and source.lanes.idle_bytes == read
    source.begin()
    wait_for_filling(llm)


@pytest.mark.fast
def test_the_profile_of_a_run_is_what_the_next_one_reads_first(
    load: Load, cache_folder: Path
) -> None:
    first = filled(load, NAME, 1.0)
    evaluate(first, PROMPTS[0])
    first.close()
    (path,) = cache_folder.iterdir()
    assert path == profile_path(first.layout) and path.stat().st_size < 100_000
    layers = json.loads(path.read_text())["layers"]
    ranked = sorted(
        ((-uses, int(layer), e) for layer, of in layers.items() for e, uses in enumerate(of))
    )
    second = filled(load, NAME, 1.0)
    assert second.source and second.source.filling
    planned = second.source.filling._uses.likeliest()
    assert planned == [(layer, e) for _, layer, e in ranked]
    assert ranked[0][0] < 0 == ranked[-1][0]
    evaluate(second, PROMPTS[1])
    second.close()
    merged, own = json.loads(path.read_text())["layers"], second.source.filling._uses.counts
    for layer, counts in merged.items():  # what is old fades
        both = zip(own[int(layer)], layers[layer], strict=True)
        assert counts == [now + old / 2 for now, old in both]


@pytest.mark.fast
def test_a_model_has_the_same_profile_in_every_process() -> None:
    code = (
        "from routeahead.engine.profile import profile_path; "
        "from routeahead.llamacpp.gguf_file import read_layout; "
        "from routeahead.models import DEFAULT_MODEL; "
        "print(profile_path(read_layout(DEFAULT_MODEL)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": "routeahead uses v1", "layers": {"0": [1]}}',
                b'{"format": "routeahead uses v1", "layers": {"0": ["x"]}}', b"\xff\xfe"],
)  # fmt: skip
def test_a_damaged_profile_is_none(load: Load, content: bytes) -> None:
    llm = load(NAME, cache_mb=0)
    path = profile_path(llm.layout)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    other = filled(load, NAME, 1.0)
    evaluate(other, PROMPTS[1])
    other.close()
    assert json.loads(path.read_text())["format"] == "routeahead uses v1"


@pytest.mark.parametrize("count", ["1" * 400, "Infinity", "NaN", "-1"])
def test_a_profile_has_counts(load: Load, count: str) -> None:
    layout = load(NAME, cache_mb=0).layout
    layers = {tensor.layer: [1] * tensor.n_expert for tensor in layout.experts}
    content = json.dumps({"format": "routeahead uses v1", "layers": layers})
    path = profile_path(layout)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert any(map(any, read_uses(layout).merged().values()))
    path.write_text(content.replace("[1,", f"[{count},", 1))
    assert not any(map(any, read_uses(layout).merged().values()))


def test_a_profile_that_is_no_file_is_none(load: Load) -> None:
    layout = load(NAME, cache_mb=0).layout
    path = profile_path(layout)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # who opened it to read would wait
    assert not any(map(any, read_uses(layout).merged().values()))


@pytest.mark.fast
def test_a_profile_that_cannot_be_written_is_left_out(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    llm = filled(load, NAME, 1.0)
    evaluate(llm, PROMPTS[1])
    llm.close()


@pytest.mark.fast
def test_without_filling_there_is_no_profile(load: Load, cache_folder: Path) -> None:
    llm = load(NAME, cache_mb=64)
    evaluate(llm, PROMPTS[1])
    llm.close()
    assert not cache_folder.exists()


@pytest.mark.fast
def test_what_looks_at_the_cache_excludes_filling(load: Load) -> None:
    with pytest.raises(SettingsError, match="fill_cache and drop_cold_experts exclude each other"):
        load(NAME, cache_mb=64, fill_cache=True, drop_cold_experts=0.5)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "fills"),
    [
        ({}, True),
        ({"route_ahead": 2}, True),
        ({"prefetch": 2}, True),
        ({"fill_cache": False}, False),
        ({"fill_cache": True}, True),
        ({"cache_mb": 0}, False),
        ({"resident": True}, False),
        ({"policy": ("own:Policy",)}, False),
        ({"policy": ("own:Policy",), "fill_cache": True}, True),
    ],
    ids=str,
)
def test_filling_is_on_in_a_conversation(settings: dict[str, object], fills: bool) -> None:
    assert Settings.split(settings)[0].fills_while_waiting == fills


@pytest.mark.fast
def test_every_setting_that_asks_the_cache_excludes_filling() -> None:
    asks = [name for name, facts in facts_of(Settings).items() if facts.asks_cache]
    assert len(asks) == 3
    for name in asks:
        kind = 0 if name == "route_ahead_candidates" else 0.5
        others = {"route_ahead": 2} if name == "route_ahead_candidates" else {}
        chosen = Settings(**{name: kind, **others}).validate()  # type: ignore[arg-type]
        assert not chosen.fills_while_waiting
        with pytest.raises(SettingsError, match=f"fill_cache and {name} exclude each other"):
            replace(chosen, fill_cache=True).validate()


@pytest.mark.fast
def test_chat_and_serve_fill_the_cache_and_nothing_else_does(library: Library) -> None:
    path, filling = library.path(NAME), []
    for waits in (False, True):
        settings = {"cache_mb": 64, "resident": False}
        llm = open_model(path, settings, lambda _: None, threads=1, waits=waits)
        if waits:
            wait_for_filling(llm)
        filling.append(llm.source is not None and llm.source.lanes.idle_bytes > 0)
        llm.close()
    assert filling == [False, True]
