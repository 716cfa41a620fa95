"""Calibration of fixture models, and what route-ahead commits with its matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import models
from support.library import PROMPTS, THREADS, Library, evaluate
from typer.testing import CliRunner

from routeahead import Llama
from routeahead.calibration import calibrate as calibrating
from routeahead.calibration.calibrate import Calibration, Request
from routeahead.cli.app import app
from routeahead.engine.fingerprint import fingerprint
from routeahead.errors import SettingsError
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.gates import Gate, Gates, read_gates, write_gates
from routeahead.routing.policy import Policy, Routing
from routeahead.types import Floats, Ids, Phase

Load = Callable[..., Llama]
DOCUMENTS = 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Random letters: a fixture's routing depends on each of them."""
    rng, path = np.random.default_rng(3), tmp_path / "text.jsonl"
    texts = ("".join(map(chr, rng.integers(97, 123, 60))) for _ in range(DOCUMENTS))
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return path


def request(library: Library, name: str, text: Path, **more: object) -> Request:
    fields: dict[str, object] = {"depths": (1, 2), "threads": THREADS, **more}
    return Request(library.path(name), [text], settings={"cache_mb": 8}, **fields)  # type: ignore[arg-type]


class Seeing(Policy):
    """Keeps the hidden vectors and the ids that the layers of each decoded token end up with."""

    def __init__(self) -> None:
        self.hidden: list[dict[int, Floats]] = []
        self.ids: list[dict[int, Ids]] = []

    def wants_hidden(self, phase: Phase) -> bool:
        return phase == "decode"

    def begin(self, phase: Phase, position: int) -> None:
        self.decoding = phase == "decode"
        if self.decoding:
            self.hidden.append({})
            self.ids.append({})

    def routed(self, routing: Routing) -> None:
        if self.decoding:
            if routing.hidden is not None:
                self.hidden[-1][routing.layer] = routing.hidden[0].copy()
            self.ids[-1][routing.layer] = routing.ids[0].copy()


def random_gates(path: Path, depth: int, file: Path) -> Gates:
    """Matrices that agree with no router, for every layer but the last."""
    layout, rng = read_layout(path), np.random.default_rng(5)
    width = int(layout.value("embedding_length"))
    found = [
        Gate(
            layer, depth, rng.normal(size=(layout.n_expert, width)).astype(np.float32),
            stale=0.5, agreement=0.5, penalty=1.0,
        )
        for layer in layout.moe_layers[depth:-1]
    ]  # fmt: skip
    gates = Gates.of(fingerprint(layout.loaded()), found, fitted=1, held=1)
    write_gates(file, gates)
    return gates


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_commits_what_the_matrices_rank(
    load: Load, library: Library, tmp_path: Path, name: str
) -> None:
    """Each committed selection is the layer's own rule on matrix times the vector N layers earlier;
    and the same wherever it is computed."""
    depth, file = 2, tmp_path / "gates.safetensors"
    gates = random_gates(library.path(name), depth, file)
    logits = []
    for compute in ("inline", "worker", "graph"):
        seeing = Seeing()
        llm = load(
            name, cache_mb=8, poison=True, route_ahead=depth, route_ahead_gates=file,
            route_ahead_compute=compute, policies=[seeing],
        )  # fmt: skip
        logits.append(evaluate(llm, PROMPTS[0]))
        policy = llm.policies.find(RouteAhead)
        assert policy and policy.predictions.watchdog.armed
        assert policy.predictions.watchdog.slots == policy.predictions.watchdog.reproduced > 0
        ranker, layers = policy.predictions.ranker, llm.layout.moe_layers
        checked = 0
        for hidden, ids in zip(seeing.hidden, seeing.ids, strict=True):
            for index, layer in enumerate(layers[depth:-1], start=depth):
                vector, gate = hidden.get(layers[index - depth]), gates.gates[layer, depth]
                if vector is not None and gate.matrix is not None:
                    wanted = ranker.rule(layer).select(gate.matrix @ vector)
                    assert sorted(ids[layer].tolist()) == sorted(wanted.tolist())
                    checked += 1
        assert checked > 20
        llm.close()
    for other in logits[1:]:
        np.testing.assert_array_equal(logits[0], other)


def test_moments_are_those_of_what_the_router_was_given(
    load: Load, library: Library, text: Path, tmp_path: Path
) -> None:
    """Fitted on all rows, a large penalty gives the router, and the moments are the sums of what a
    policy of its own sees."""
    calibration = Calibration(request(library, "qwen3moe", text), tmp_path / "partial")
    gates = calibration.run()
    layout = read_layout(library.path("qwen3moe"))
    assert set(gates.gates) == {
        (layer, depth) for depth in (1, 2) for layer in layout.moe_layers[depth:]
    }
    assert gates.fitted + gates.held == DOCUMENTS * 61  # a token a letter, and the first
    assert gates.held == 61
    for gate in gates.gates.values():
        assert gate.agreement >= gate.stale > 0
        assert (gate.matrix is None) == (gate.penalty is None)
    assert any(gate.matrix is not None for gate in gates.gates.values())


def test_resumed_is_what_it_would_have_been(
    library: Library, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "partial"
    first = Calibration(request(library, "qwen3moe", text), partial)
    whole = first.run()
    first.forget()
    monkeypatch.setattr(calibrating, "_CHECKPOINT_S", 0.0)
    seen = 0

    def stop_at_third(what: str, done: int, total: int) -> None:
        nonlocal seen
        seen += what == "fitting"
        if seen == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Calibration(request(library, "qwen3moe", text), partial).run(stop_at_third)
    assert partial.exists()
    shown: list[tuple[str, int]] = []
    again = Calibration(request(library, "qwen3moe", text), partial)
    resumed = again.run(lambda what, done, total: shown.append((what, done)))
    assert shown[0] == ("fitting", 2 * 61)
    for place, gate in whole.gates.items():
        other = resumed.gates[place]
        assert (other.stale, other.agreement, other.penalty) == (
            gate.stale, gate.agreement, gate.penalty,
        )  # fmt: skip
        if gate.matrix is not None and other.matrix is not None:
            np.testing.assert_array_equal(gate.matrix, other.matrix)


def test_a_checkpoint_of_something_else_is_refused(
    library: Library, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "partial"

    def stop_when_solving(what: str, done: int, total: int) -> None:
        if what == "solving":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Calibration(request(library, "qwen3moe", text), partial).run(stop_when_solving)
    with pytest.raises(SettingsError, match="another model or text"):
        Calibration(request(library, "qwen3moe", text, depths=(1,)), partial).run()


def test_memory_that_does_not_suffice_is_refused_before_the_load(
    library: Library, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = request(library, "qwen3moe", text)
    need = Calibration(plan, tmp_path / "partial").nbytes
    layout = read_layout(plan.model)
    room = layout.dense_bytes + layout.layer_bytes() + need
    monkeypatch.setattr(calibrating, "available_bytes", lambda: room)
    Calibration(plan, tmp_path / "partial")
    monkeypatch.setattr(calibrating, "available_bytes", lambda: room - 1)
    with pytest.raises(SettingsError, match=r"takes \d+ MiB.*--layers"):
        Calibration(plan, tmp_path / "partial")
    fewer = Calibration(
        request(library, "qwen3moe", text, layers=range(2, 4)), tmp_path / "partial"
    )
    assert {pair.target for pair in fewer.pairs} == {2, 3}


def test_the_verb_writes_extends_and_refuses(
    library: Library, text: Path, tmp_path: Path, load: Load
) -> None:
    out, model = tmp_path / "gates.safetensors", library.path("qwen3moe")
    words = ["calibrate", str(model), "--text", str(text), "--out", str(out), "--cache-mb", "8"]

    def call(*more: str) -> object:
        return CliRunner().invoke(app, [*words, "-t", "1", *more], catch_exceptions=True)

    assert call("--depth", "1", "--layers", "0-2").exit_code == 0  # type: ignore[attr-defined]
    assert call("--depth", "1", "--layers", "3-5").exit_code == 0  # type: ignore[attr-defined]
    gates = read_gates(out, fingerprint(read_layout(model).loaded()))
    assert sorted(gates.gates) == [(layer, 1) for layer in range(1, 6)]
    assert [one.name for one in tmp_path.iterdir() if "partial" in one.name] == []
    for more, why in (
        (("--depth", "9"), "nothing to predict"),
        (("--layers", "7-9"), "has no router"),
        (("--layers", "a"), "give numbers"),
        (("--max-tokens", "20"), "no held-out document"),
    ):
        error = call(*more).exception  # type: ignore[attr-defined]
        assert isinstance(error, SettingsError) and why in str(error)
    with pytest.raises(SettingsError, match="another model"):
        load("gpt-oss", cache_mb=8, route_ahead=1, route_ahead_gates=out)
    with pytest.raises(SettingsError, match="not 2"):
        load("qwen3moe", cache_mb=8, route_ahead=2, route_ahead_gates=out)
    with pytest.raises(SettingsError, match="no effect without route_ahead"):
        load("qwen3moe", cache_mb=8, route_ahead_gates=out)


def test_what_was_fitted_outlives_a_result_that_cannot_be_written(
    library: Library, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command then goes on where it was, and fits nothing again."""
    out, partial = tmp_path / "gates.safetensors", tmp_path / "gates.safetensors.partial"
    words = ["calibrate", str(library.path("qwen3moe")), "--text", str(text), "--out", str(out)]

    def full(*_: object) -> None:
        raise SettingsError(f"{out}: cannot be written: No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr("routeahead.cli.calibrate.write_gates", full)
        failed = CliRunner().invoke(app, [*words, "-t", "1", "--depth", "1"])
    assert isinstance(failed.exception, SettingsError) and partial.exists()
    moments = []
    add = calibrating.Fitting.seen
    monkeypatch.setattr(
        calibrating.Fitting, "seen", lambda self, *seen: moments.append(add(self, *seen))
    )
    assert CliRunner().invoke(app, [*words, "-t", "1", "--depth", "1"]).exit_code == 0
    assert out.exists() and not partial.exists() and not moments


def test_a_text_that_is_shorter_than_a_vector_is_said(library: Library, tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for one in texts:
        one.write_text("a few words")
    words = ["calibrate", str(library.path("qwen3moe")), "--out", str(tmp_path / "g"), "-t", "1"]
    done = CliRunner().invoke(app, [*words, *(w for one in texts for w in ("--text", str(one)))])
    assert done.exit_code == 0
    assert "that is little: a vector has" in done.stderr
    assert "slots predicted right: by the layers' own routers / calibrated" in done.stderr


def test_every_fixture_can_be_calibrated(library: Library, text: Path, tmp_path: Path) -> None:
    for name in models.FIXTURES:
        gates = Calibration(request(library, name, text, depths=(1,)), tmp_path / name).run()
        assert gates.gates and all(gate.stale > 0 for gate in gates.gates.values()), name
