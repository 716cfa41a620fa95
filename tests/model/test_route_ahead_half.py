"""Route-ahead at half a layer: a layer's experts from what its own attention is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import architectures, models, raw
from support.faults import Fault, RaisingStop
from support.library import (
    PROMPTS,
    THREADS,
    Library,
    csv_rows,
    evaluate,
    token_batches,
    with_budget,
)
from support.llama_library import LlamaLibrary
from support.readers import Delayed
from support.router_reference import Forced, Routers
from typer.testing import CliRunner

from routeahead import Llama, SettingsError, StreamError
from routeahead.calibration.calibrate import Calibration, Request
from routeahead.cli.app import app
from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.gates import write_gates
from routeahead.routing.policy import HALF, Policy, Routing
from routeahead.telemetry.recorder import Outputs
from routeahead.types import Floats, Phase

Load = Callable[..., Llama]
MARGIN = 2e-5  # as in test_route_ahead


def policy_of(llm: Llama) -> RouteAhead:
    policy = llm.policies.find(RouteAhead)
    assert policy
    return policy


@pytest.mark.fast
@pytest.mark.parametrize("name", models.FIXTURES)
def test_each_layer_is_what_its_router_ranks_of_its_attentions_input(
    load: Load, library: Library, tmp_path: Path, name: str
) -> None:
    """Every layer, the first too: by plain llama.cpp and NumPy."""
    trace = tmp_path / "route.csv"
    llm = with_budget(
        load, name, 0.25, route_ahead=HALF, poison=True, wrap_reader=Delayed,
        outputs=Outputs(route_trace=trace),
    )  # fmt: skip
    logits, tokens = evaluate(llm, PROMPTS[0]), len(PROMPTS[0]) - 1
    counts, source = policy_of(llm).counts, llm.source
    assert source and 0 < source.prefetch.issued == source.prefetch.useful
    assert counts.committed == len(llm.layout.moe_layers) * tokens and not counts.passed_through
    watchdog = policy_of(llm).predictions.watchdog
    assert watchdog.slots == watchdog.reproduced > 0
    decode = llm.counters.decode
    assert decode.misses == source.prefetch.issued
    assert 0 < decode.early_bytes <= decode.bytes_read
    llm.close()
    ids: dict[tuple[int, int], list[int]] = {}
    for row in csv_rows(trace):
        if row["phase"] == "1":
            assert row["committed"] == "1"
            ids.setdefault((int(row["step"]), int(row["layer"])), []).append(int(row["expert"]))
    chosen = {key: np.array(slots, np.int32) for key, slots in ids.items()}
    forced = Forced(library.path(name), chosen, threads=THREADS)
    np.testing.assert_array_equal(forced.evaluate(PROMPTS[0]), logits)
    forced.close()
    routers = Routers(library.path(name), models.FIXTURES[name])
    for (position, layer), slots in chosen.items():
        scores = routers.scores(layer, forced.attended[position, layer])
        assert routers.is_ranking(slots, scores, MARGIN), (position, layer)


SETTINGS: list[dict[str, object]] = [
    {"io_threads": 1, "overlap": False},
    {"io_threads": 2, "poison": True},
    {"io_threads": 4, "wrap_reader": Delayed, "poison": True},
    {"budget": 0.0},
    {"budget": 1.0},
]


def unannounced(llm: Llama) -> bytes:
    """The logits of a prompt and tokens that a client gives to llama.cpp itself. The first layer of
    such a batch has passed before anybody knows of it, and belongs to no earlier one."""
    policy, layers, llm.phase = policy_of(llm), list[int](), None
    shown = policy.before_attention

    def seen(layer: int, hidden: Floats) -> None:
        layers.append(layer)
        shown(layer, hidden)

    policy.before_attention = seen  # type: ignore[method-assign]
    logits, tokens = raw.evaluate(llm, PROMPTS[0]), len(PROMPTS[0]) - 1
    assert layers == list(llm.layout.moe_layers[1:]) * tokens
    assert policy.counts.by_reason["unreadable"] == tokens
    return logits.tobytes()


@pytest.mark.parametrize("name", ["qwen3moe", "gemma4", "deepseek2-grouped"])
def test_the_output_depends_on_the_hidden_states_alone(load: Load, name: str) -> None:
    """Several rows at once, and batches that nobody announced, are predicted too."""
    outputs, direct = set(), set()
    prompt, *tokens = token_batches(4, decode=12)
    several = [prompt, tokens[0], tokens[1] + tokens[2] + tokens[3], *tokens[4:]]
    for settings in SETTINGS:
        chosen = dict(settings)
        share = float(str(chosen.pop("budget", 0.2)))
        llm = with_budget(load, name, share, route_ahead=HALF, **chosen)
        outputs.add(b"".join(evaluate(llm, batches).tobytes() for batches in (*PROMPTS, several)))
        counts = policy_of(llm).counts
        assert counts.passed_through == counts.by_reason["fewer_rows"] <= 1
        direct.add(unannounced(llm))
        llm.close()
    assert len(outputs) == len(direct) == 1


def test_skipped_layers_are_the_routers_and_candidates_choose(load: Load, library: Library) -> None:
    llm = with_budget(load, "qwen3moe", 0.25, route_ahead=HALF, route_ahead_skip=2)
    evaluate(llm, PROMPTS[0])
    counts, tokens = policy_of(llm).counts, len(PROMPTS[0]) - 1
    assert counts.committed == 4 * tokens and counts.by_reason["structural"] == 2 * tokens
    llm = with_budget(
        load, "qwen3moe", 0.25, route_ahead=HALF, route_ahead_candidates=16, poison=True
    )
    for batches, expected in zip(PROMPTS, library.resident("qwen3moe"), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


def test_whole_depths_have_no_stop_for_it(load: Load) -> None:
    stops = []
    for depth in (1, HALF):
        llm = load("qwen3moe", cache_mb=8, overlap=False, route_ahead=depth)
        evaluate(llm, PROMPTS[0])
        before = llm.stops
        llm.phase = "decode"
        llm.eval([7])
        stops.append(llm.stops - before)
    layers = len(llm.layout.moe_layers)
    assert stops == [layers, 2 * layers]


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 4])
def test_a_fault_at_the_stop_leaves_nothing(
    load: Load, monkeypatch: pytest.MonkeyPatch, call: int, error: type[BaseException]
) -> None:
    llm = with_budget(load, "qwen3moe", 0.25, route_ahead=HALF, poison=True, wrap_reader=Delayed)
    expected = [evaluate(llm, batches) for batches in PROMPTS]
    assert llm.streamed
    stream = llm.streamed.stream
    stop = RaisingStop(stream.before_attention, error, call)
    monkeypatch.setattr(stream, "before_attention", stop)
    with pytest.raises(error):
        evaluate(llm, PROMPTS[0])
    monkeypatch.undo()
    for batches, logits in zip(PROMPTS, expected, strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), logits)


def test_an_architecture_that_shows_no_norm_is_refused_in_one_line(tmp_path: Path) -> None:
    library = LlamaLibrary()
    path = architectures.write(tmp_path, "lfm2moe", library)
    library.close()
    llm = Llama(path, n_ctx=64, n_threads=1, cache_mb=8, route_ahead=HALF)
    llm.eval([5, 6, 7])
    with pytest.raises(StreamError, match=r"shows no attn_norm-.* give 1 or more") as raised:
        llm.eval([8])
    assert "\n" not in str(raised.value)
    llm.close()


# --- calibration ---


class Attending(Policy):
    """Counts what each layer's own router says of what its attention is given."""

    def __init__(self) -> None:
        self.slots = self.right = 0
        self._hidden: dict[int, Floats] = {}

    def bind(self, model) -> None:  # type: ignore[no-untyped-def]
        self.ranker = model.ranker("f32")

    def wants_hidden(self, phase: Phase) -> bool:
        return True

    def wants_attention_input(self, phase: Phase) -> bool:
        return True

    def begin(self, phase: Phase, position: int) -> None:
        self.ranker.prepare()

    def before_attention(self, layer: int, hidden: Floats) -> None:
        self._hidden[layer] = hidden.copy()

    def routed(self, routing: Routing) -> None:
        if routing.layer not in self.ranker:
            return
        for row, ids in zip(self._hidden[routing.layer], routing.ids.tolist(), strict=True):
            predicted = self.ranker.rank(routing.layer, row)
            self.slots += len(ids)
            self.right += len(set(ids).intersection(predicted.tolist()))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng, path = np.random.default_rng(3), tmp_path / "text.jsonl"
    texts = ["".join(map(chr, rng.integers(97, 123, 60))) for _ in range(6)]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return path


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_calibration_fits_and_counts_what_is_before_attention(
    load: Load, library: Library, text: Path, tmp_path: Path, name: str
) -> None:
    """Beside whole depths, of which nothing changes. Counted once more by a policy; and used."""
    path = library.path(name)

    def calibrated(*depths: float):  # type: ignore[no-untyped-def]
        request = Request(path, [text], depths, threads=THREADS, settings={"cache_mb": 8})
        calibration = Calibration(request, tmp_path / "partial")
        gates = calibration.run()
        calibration.forget()
        return gates

    gates, plain = calibrated(HALF, 1), calibrated(1)
    layers = list(load(name, cache_mb=8).layout.moe_layers)
    assert sorted(gates.at(HALF)) == layers and sorted(gates.at(1)) == layers[1:]
    for place, gate in plain.gates.items():
        other = gates.gates[place]
        assert (gate.stale, gate.agreement) == (other.stale, other.agreement)
    for gate in gates.at(HALF).values():
        assert gate.agreement >= gate.stale > 0
    attending = Attending()
    llm = load(name, cache_mb=8, logits_all=True, policies=[attending])
    llm.eval([0])
    held = json.loads(text.read_text().splitlines()[4])["text"]
    llm.reset()
    llm.eval(llm.tokenize(held.encode(), add_bos=True))
    stale = np.mean([gate.stale for gate in gates.at(HALF).values()])
    assert attending.slots == 61 * len(layers) * llm.layout.n_expert_used
    assert attending.right / attending.slots == pytest.approx(stale, abs=2e-3)
    file = tmp_path / "gates.safetensors"
    write_gates(file, gates)
    agreed = []
    for given in ({}, {"route_ahead_gates": file}):
        llm = load(name, cache_mb=8, route_ahead=HALF, **given)
        evaluate(llm, token_batches(7, decode=60))
        counts = policy_of(llm).counts
        assert counts.committed == 60 * len(layers)
        agreed.append(counts.agreed_slots / counts.slots)
    assert agreed[0] != agreed[1]
    with pytest.raises(SettingsError, match=r"depth 0\.5, 1, not 2"):
        load(name, cache_mb=8, route_ahead=2, route_ahead_gates=file)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"route_ahead": 1.5}, r"route_ahead is 1\.5: give a whole number of MoE layers, or 0\.5"),
        ({"route_ahead": 0.25}, r"route_ahead is 0\.25: give a whole number"),
        ({"route_ahead": "1"}, "route_ahead is '1': give a number"),
        ({"route_ahead": 0.5, "route_ahead_compute": "worker"}, "compute='inline'"),
        ({"route_ahead": 0.5, "route_ahead_compute": "graph"}, "compute='inline'"),
    ],
)
def test_depths_that_make_no_sense(load: Load, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load("qwen3moe", cache_mb=8, **settings)


def test_the_command_line_takes_half_a_layer_and_no_other_part(
    library: Library, text: Path, tmp_path: Path
) -> None:
    model, report = str(library.path("qwen3moe")), tmp_path / "report.json"

    def call(*words: str):  # type: ignore[no-untyped-def]
        return CliRunner().invoke(app, list(words), catch_exceptions=True)

    run = ("run", model, "-p", "a", "--raw", "-n", "4", "-c", "64", "-t", "1", "--cache-mb", "8")
    for depth, written in (("0.5", HALF), ("2", 2)):
        assert call(*run, "--route-ahead", depth, "--report", str(report)).exit_code == 0
        found = json.loads(report.read_text())["route_ahead"]["depth"]
        assert found == written and type(found) is type(written)
    assert "give a whole number" in str(call(*run, "--route-ahead", "1.5").exception)
    calibrate = ("calibrate", model, "--text", str(text), "--out", str(tmp_path / "g"))
    for depth in ("1.5", "0.75"):
        error = call(*calibrate, "--depth", depth, "-t", "1").exception
        assert isinstance(error, SettingsError) and "as a whole number of layers" in str(error)
