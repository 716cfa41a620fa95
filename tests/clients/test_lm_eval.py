"""`routeahead.lm_eval`: what lm-evaluation-harness grades is what a decode computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from routeahead import Llama
from routeahead.models import DEFAULT_MODEL

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[lm-eval]'")

from lm_eval.api.instance import Instance

from routeahead.lm_eval import RouteAheadLM

QUESTION = "Question: What is 91 - 64?\nAnswer:"
ANSWERS = (" 27", " 28", " 55")


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def model(**settings: Any) -> RouteAheadLM:
    return RouteAheadLM(DEFAULT_MODEL, n_threads=1, n_ctx=128, **settings)


def grades(lm: RouteAheadLM) -> list[tuple[float, bool]]:
    choices = requests("loglikelihood", *((QUESTION, answer) for answer in ANSWERS))
    return lm.loglikelihood([*choices, *requests("loglikelihood", ("", "The capital"))], True)


def test_streamed_answers_equal_resident_ones() -> None:
    resident, streamed = model(resident=True), model(cache_mb=0)
    assert grades(streamed) == grades(resident)
    text = requests("loglikelihood_rolling", ("The capital of France is Paris. " * 40,))
    assert streamed.loglikelihood_rolling(text, True) == resident.loglikelihood_rolling(text, True)
    prompt = requests("generate_until", (QUESTION, {"until": ["\n"], "max_gen_toks": 8}))
    assert streamed.generate_until(prompt, True) == resident.generate_until(prompt, True) == [" 27"]


def test_the_right_answer_is_likeliest() -> None:
    right, near, wrong, _ = grades(model(cache_mb=0))
    assert right[1] and not near[1] and not wrong[1]
    assert right[0] > near[0] > wrong[0]


def test_grades_are_those_of_decodes() -> None:
    """All that is graded is a decode, and the shared context is evaluated once."""
    lm = model(cache_mb=0)
    lm.loglikelihood(requests("loglikelihood", *((QUESTION, answer) for answer in ANSWERS)), True)
    counters = lm.llm.counters
    graded = sum(len(lm.tok_encode(answer)) for answer in ANSWERS)
    assert counters.decode.tokens == counters.decode.batches == graded
    assert counters.prefill.tokens == len(lm.tok_encode(QUESTION)) - 1


def test_lossy_settings_show() -> None:
    exact, early = model(cache_mb=2), model(cache_mb=2, route_ahead=2)
    assert grades(early) != grades(exact)


def test_a_long_context_is_cut_at_its_beginning() -> None:
    lm = model(cache_mb=2)
    long = requests("loglikelihood", ("One two three. " * 100 + QUESTION, ANSWERS[0]))
    [(value, greedy)] = lm.loglikelihood(long, True)
    assert value < 0 and isinstance(greedy, bool)
    assert lm.llm.n_tokens <= lm.max_length


def test_a_loaded_model_is_taken() -> None:
    llm = Llama(DEFAULT_MODEL, n_ctx=128, n_threads=1, cache_mb=0)
    assert RouteAheadLM(llm).llm is llm


TASK = """\
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: " "
metric_list:
  - metric: acc
"""


def test_the_harness_runs_it(tmp_path: Path) -> None:
    """From its own command line, on a task in a local file."""
    data = tmp_path / "sums.json"
    sums = [(2, 3), (10, 20), (7, 8), (41, 5)]
    lines = [
        {
            "prompt": f"Question: What is {a} + {b}?\nAnswer:",
            "choices": [str(a + b), str(a + b + 9)],
        }
        for a, b in sums
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "sums.yaml").write_text(TASK.format(data=data))
    command = [
        *(sys.executable, "-m", "routeahead.lm_eval", "run", "--model", "routeahead"),
        *("--model_args", f"pretrained={DEFAULT_MODEL},cache_mb=2,n_threads=1"),
        *("--tasks", "sums", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "out")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    [results] = (tmp_path / "out").rglob("results*.json")
    assert json.loads(results.read_text())["results"]["sums"]["acc,none"] == 1.0
