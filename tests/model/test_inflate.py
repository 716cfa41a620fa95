"""benchmarks/inflate_model.py: a larger model with the same text and the same routing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from support.library import csv_rows

from routeahead import Llama
from routeahead.engine.fingerprint import fingerprint
from routeahead.evaluation.grading import greedy
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.models import DEFAULT_MODEL
from routeahead.prediction.gates import Gate, Gates, write_gates
from routeahead.telemetry.recorder import Outputs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "inflate_model.py"


def inflate(small: Path, large: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(small), str(large), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def generated(
    path: Path, trace: Path, prompt: str, **settings: object
) -> tuple[str, list[tuple[str, ...]]]:
    """Greedy text, and each slot's expert by step and layer."""
    llm = Llama(
        path, n_ctx=256, n_threads=1, cache_mb=64, outputs=Outputs(route_trace=trace), **settings
    )
    tokens = []
    for token in greedy(llm, llm.tokenize(prompt.encode()), through_decode=True):
        tokens.append(token)
        if len(tokens) == 24:
            break
    text = llm.detokenize(tokens).decode()
    llm.close()
    names = ("step", "layer", "slot", "expert")
    return text, [tuple(row[name] for name in names) for row in csv_rows(trace)]


def test_same_text_and_routing(tmp_path: Path) -> None:
    model, large = DEFAULT_MODEL, tmp_path / "large.gguf"
    done = inflate(model, large, "--width", "320", "--expert-width", "128")
    assert done.returncode == 0, done.stderr
    before, after = read_layout(model), read_layout(large)
    assert after.value("embedding_length") == 320
    assert after.value("expert_feed_forward_length") == 128
    assert after.expert_bytes > 2 * before.expert_bytes
    prompt = "Question: What is 17 + 45?\nAnswer:"
    text, routed = generated(model, tmp_path / "small.csv", prompt)
    same_text, same_routed = generated(large, tmp_path / "large.csv", prompt)
    assert text == same_text and text.strip()
    equal = sum(a == b for a, b in zip(routed, same_routed, strict=True))
    assert (
        equal / len(routed) > 0.995
    )  # sums of more addends round differently: a near-tie may fall


def test_calibrated_routers_commit_the_same(tmp_path: Path) -> None:
    small = read_layout(DEFAULT_MODEL)
    rng, depth, file = np.random.default_rng(1), 2, tmp_path / "small.safetensors"
    matrices = (rng.normal(size=(small.n_expert, 192)).astype(np.float32) for _ in range(9))
    gates = [
        Gate(layer, depth, matrix, stale=0.5, agreement=0.5, penalty=1.0)
        for layer, matrix in zip(small.moe_layers[depth:], matrices, strict=False)
    ]
    write_gates(file, Gates.of(fingerprint(small.loaded()), gates, fitted=1, held=1))
    large = tmp_path / "large.gguf"
    done = inflate(
        DEFAULT_MODEL, large, "--width", "256", "--expert-width", "96", "--gates", str(file)
    )
    assert done.returncode == 0, done.stderr
    prompt, ahead = "Question: What is 17 + 45?\nAnswer:", {"route_ahead": depth}
    found = [
        generated(path, tmp_path / f"{path.stem}.csv", prompt, route_ahead_gates=one, **ahead)[1]
        for path, one in ((DEFAULT_MODEL, file), (large, tmp_path / "large.gates.safetensors"))
    ]
    first = len(small.moe_layers) * small.n_expert_used  # slots of the first token: nothing differs
    assert found[0][:first] == found[1][:first]


def test_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    second = ROOT / "benchmarks" / "data" / "second.gguf"
    for model, flags, why in (
        (DEFAULT_MODEL, ("--width", "100"), "multiple of 32"),
        (DEFAULT_MODEL, ("--width", "128"), "at least the model's 192"),
        (second, (), "knows qwen3moe only"),
    ):
        done = inflate(model, tmp_path / "large.gguf", *flags)
        assert done.returncode == 1 and why in done.stderr
    assert list(tmp_path.iterdir()) == []
