"""`routeahead eval`: a lossless setting costs exactly nothing, a lossy one does not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.evaluations import PLAIN, TOKENS, PlainLlama, continuation, fewer
from support.library import Library
from support.reference import Resident

from routeahead.errors import SettingsError
from routeahead.evaluation import corpus
from routeahead.evaluation.evaluate import Evaluation, Request, Setting
from routeahead.evaluation.quality import log_softmax, perplexity
from routeahead.llamacpp.gguf_file import read_layout

pytest_plugins = ["support.eval_fixtures"]


def batched_nll(path: Path, chunks: list[corpus.Chunk]) -> list[float]:
    """Of llama-cpp-python alone, which evaluates a chunk as one batch."""
    llm = PlainLlama(str(path), n_ctx=256, n_batch=256, n_threads=1, logits_all=True, verbose=False)
    nll = []
    for chunk in chunks:
        llm.reset()
        llm.eval(chunk.inputs)
        log_p = log_softmax(llm.scores[: len(chunk.inputs)])
        nll += [-log_p[row, target] for row, target in enumerate(chunk.targets)]
    llm.close()
    return nll


def chunks_of(evaluation: Evaluation) -> list[corpus.Chunk]:
    return [piece for piece in evaluation.pieces if isinstance(piece, corpus.Chunk)]


# --- what it must show ---


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_plain_stream_costs_nothing(
    request_on: Callable[..., Request], tmp_path: Path, name: str
) -> None:
    baseline, plain = Evaluation(request_on(name), [PLAIN], tmp_path / "work").run()
    assert plain.text and baseline.text
    assert plain.text["tokens"] == TOKENS
    assert (plain.text["kl_mean"], plain.text["kl_p99"], plain.text["agreement"]) == (0, 0, 1)
    assert plain.text["perplexity"] == baseline.text["perplexity"]
    # It did stream, and every graded token went through decode, one at a time.
    assert plain.cost["tokens"] == baseline.cost["tokens"] == TOKENS
    assert plain.cost["bytes_per_token"] > 0 and plain.cost["hit_rate"] == 0
    assert baseline.cost["bytes_per_token"] == 0 and baseline.cost["hit_rate"] is None


@pytest.mark.parametrize(("name", "top_k"), [("qwen3moe", 4), ("mixtral", 2)])
def test_an_expert_fewer_costs_something(
    request_on: Callable[..., Request], tmp_path: Path, name: str, top_k: int
) -> None:
    request = request_on(name, generate=20)
    _, plain, lossy = Evaluation(request, [PLAIN, fewer(top_k - 1)], tmp_path).run()
    assert lossy.text and plain.text and lossy.generations
    assert lossy.text["kl_mean"] > 0.001 and lossy.text["kl_p99"] > lossy.text["kl_median"] > 0
    assert lossy.text["agreement"] < 1
    assert lossy.text["perplexity"] != plain.text["perplexity"]
    assert lossy.cost["bytes_per_token"] < plain.cost["bytes_per_token"]
    assert lossy.generations["equal"] == 0 and lossy.generations["equal_share"] < 1


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "gpt-oss"])
def test_perplexity_is_that_of_one_batched_pass(
    library: Library, request_on: Callable[..., Request], tmp_path: Path, name: str
) -> None:
    evaluation = Evaluation(request_on(name), [], tmp_path)
    (baseline,) = evaluation.run()
    expected = perplexity(batched_nll(library.path(name), chunks_of(evaluation)))
    assert baseline.text and baseline.text["perplexity"] == pytest.approx(expected, rel=0.005)


def test_figures_are_those_of_llama_cpp_alone(
    library: Library, request_on: Callable[..., Request], tmp_path: Path
) -> None:
    """Token by token, on logits that nothing of this package touched."""
    evaluation = Evaluation(request_on(), [PLAIN], tmp_path)
    evaluation.run()
    model = Resident(library.path("qwen3moe"), n_ctx=256, threads=1)
    for chunk in chunks_of(evaluation):
        log_p = log_softmax(model.evaluate([[token] for token in chunk.inputs]))
        expected = [-log_p[row, target] for row, target in enumerate(chunk.targets)]
        found = json.loads((tmp_path / "settings" / "plain" / f"{chunk.name}.json").read_text())
        np.testing.assert_allclose(found["nll"], expected, rtol=1e-9)
    model.close()


def test_a_trained_model(tmp_path: Path) -> None:
    path = os.environ.get("ROUTEAHEAD_MODEL")
    if not path:
        pytest.skip("ROUTEAHEAD_MODEL names no trained model")
    request = Request(Path(path), text=Path(__file__), context=128, max_tokens=256, threads=1)
    top_k = read_layout(path).n_expert_used
    evaluation = Evaluation(request, [PLAIN, fewer(top_k - 1)], tmp_path)
    baseline, plain, lossy = evaluation.run()
    expected = perplexity(batched_nll(Path(path), chunks_of(evaluation)))
    assert baseline.text and baseline.text["perplexity"] == pytest.approx(expected, rel=0.005)
    assert plain.text and plain.text["kl_p99"] == 0 and plain.text["agreement"] == 1
    assert lossy.text and lossy.text["kl_median"] > 0 and lossy.text["agreement"] < 1


# --- pieces ---


@pytest.mark.parametrize("bos", [(), (1,)])
@pytest.mark.parametrize("length", [2, 16, 17, 33, 50])
def test_each_token_is_graded_once(bos: tuple[int, ...], length: int) -> None:
    text = list(range(100, 100 + length))
    chunks = corpus.chunks(text, bos, context=16, max_tokens=40)
    graded = [token for chunk in chunks for token in chunk.targets]
    assert graded == (text if bos else text[1:])[:40]
    for chunk in chunks:
        assert len(chunk.inputs) == len(chunk.targets) <= 16
        assert chunk.inputs[1:] == chunk.targets[:-1]
        assert chunk.inputs[0] == (1 if bos else chunk.targets[0] - 1)


def test_answers_by_kind(request_on: Callable[..., Request], prompts: Path, tmp_path: Path) -> None:
    request = request_on("mixtral", text=None, prompts=prompts)
    baseline, plain = Evaluation(request, [PLAIN], tmp_path / "work").run()
    assert baseline.answers == plain.answers == {"known": [1, 2], "unknown": [0, 1]}
    assert (plain.right, plain.asked) == (1, 3)


def test_prompts_go_through_decode_when_asked(
    request_on: Callable[..., Request], prompts: Path, tmp_path: Path
) -> None:
    request = request_on("mixtral", text=None, prompts=prompts, generate=10)
    through = replace(request, prompt_through_decode=True)
    _, prefilled = Evaluation(request, [PLAIN], tmp_path / "prefill").run()
    _, decoded = Evaluation(through, [PLAIN], tmp_path / "decode").run()
    prompt_tokens = 2 * sum(1 + len(prompt) for prompt in ("hello", "hello", "2+2="))  # BOS
    assert decoded.cost["tokens"] == prefilled.cost["tokens"] + prompt_tokens


def test_a_generation_is_the_models_own(
    library: Library, request_on: Callable[..., Request], prompts: Path, tmp_path: Path
) -> None:
    request = request_on("mixtral", text=None, prompts=prompts, generate=16)
    _, plain = Evaluation(request, [PLAIN], tmp_path / "work").run()
    assert plain.generations == {
        "count": 3,
        "equal": 3,
        "equal_share": 1.0,
        "first_divergence": [None] * 3,
    }
    found = json.loads((tmp_path / "work/settings/plain/generate-00000.json").read_text())["tokens"]
    text = bytes(token - 3 for token in found if token >= 3).decode(errors="replace").lstrip()
    assert text == continuation(library.path("mixtral"), "hello", 16)


# --- what cannot be graded on ---


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "give an object"),
        ('{"prompt": "a"}', '"answer" must be a text'),
        ('{"prompt": " ", "answer": "b"}', '"prompt" must be a text'),
        ('{"prompt": "a", "answer": "b", "kind": 3}', '"kind" must be'),
    ],
)
def test_bad_prompts(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(SettingsError, match=reason):
        corpus.read_prompts(path)


def test_bad_requests(request_on: Callable[..., Request], prompts: Path, tmp_path: Path) -> None:
    def refused(reason: str, request: Request, *settings: Setting) -> None:
        with pytest.raises(SettingsError, match=reason):
            Evaluation(request, settings, tmp_path / "work")

    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe")
    refused("give --text or --prompts", request_on(text=None))
    refused("no token to grade", request_on(text=empty))
    refused("not UTF-8", request_on(text=binary))
    refused("cannot read it: No such file", request_on(text=tmp_path / "none"))
    refused("no prompt in it", request_on(text=None, prompts=empty))
    refused("raise --context", request_on(text=None, prompts=prompts, context=16))
    refused(r"generation from prompt 1 needs 2 \+ 100", request_on(generate=100))
    refused("same name", request_on(), PLAIN, PLAIN)
    refused("give it a name", request_on(), Setting("../x", {}))
    refused("other than baseline", request_on(), Setting("baseline", {}))
