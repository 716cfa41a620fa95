"""`routeahead.Llama` in place of `llama_cpp.Llama`: what copied code passes, and what tools see."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from support import arguments, models
from support.library import PROMPTS, Library, evaluate

import routeahead
from routeahead import Llama, SettingsError, StreamError
from routeahead.engine import loading

Load = Callable[..., Llama]
NAME = "qwen3moe"
DENSE = models.Spec(
    "llama", layers=2, experts=0, top_k=0, expert_width=models.DENSE_WIDTH, dense_layers=2
)


# --- what copied code passes ---


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        (
            {"n_gpu_layers": -1},
            r"^ignored: n_gpu_layers \(this llama.cpp was built without a GPU\)$",
        ),
        ({"use_mlock": True, "n_gpu_layers": 99}, r"ignored: n_gpu_layers .*, use_mlock \("),
    ],
)
def test_what_has_no_effect_is_ignored(
    load: Load, library: Library, keywords: dict[str, Any], named: str
) -> None:
    with pytest.warns(UserWarning, match=named) as warned:
        llm = load(NAME, cache_mb=0, **keywords)
    assert [Path(w.filename).name for w in warned] == ["conftest.py"]  # the caller, once
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


def test_experts_are_not_copied_to_a_device(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp would copy them when their part of the graph begins, before they have been read:
    wrong tokens, silently."""
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    with pytest.raises(SettingsError, match=r"^op_offload copies experts to the device before"):
        load(NAME, op_offload=True)
    load(NAME, cache_mb=0, op_offload=None)


def test_what_clients_still_pass_is_taken(load: Load) -> None:
    """llama_cpp.server passes the first two, LangChain the others; none is an error or a line."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(NAME, cache_mb=0, use_mlock=False, use_mmap=True, mul_mat_q=True, rpc_servers=None,
             n_parts=-1, f16_kv=True)  # fmt: skip


def test_a_dense_model_is_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.write(tmp_path / "dense.gguf", DENSE)
    plain = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
    with pytest.warns(UserWarning, match=r"dense\.gguf: cannot stream.*it has no experts \(llama"):
        llm = Llama(path, n_ctx=64, n_threads=1, cache_mb=100, route_ahead=2)
    assert llm.settings.resident and llm.source is None
    text = plain.create_completion("abc", max_tokens=8, temperature=0)["choices"][0]["text"]
    assert llm.create_completion("abc", max_tokens=8, temperature=0)["choices"][0]["text"] == text
    llm.close()
    with pytest.raises(StreamError, match=r"no experts \(llama\)\): traces and policies are about"):
        Llama(path, policies=[routeahead.Policy()])
    monkeypatch.setattr(loading, "available_bytes", lambda: 1000)
    with pytest.raises(StreamError, match=r"dense\.gguf: cannot stream .* do not fit in the 0 MiB"):
        Llama(path)


def test_the_plain_class_may_be_replaced(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As code does that loads models by itself: LangChain, llama-index, the server."""
    options: Any = {"n_ctx": 64, "n_threads": 1, "verbose": False}
    plain = load(NAME, resident=True).create_completion("abc", max_tokens=4, temperature=0)
    monkeypatch.setattr(llama_cpp, "Llama", Llama)
    llm: Any = llama_cpp.Llama(model_path=str(library.path(NAME)), **options)
    made = llm.create_completion("abc", max_tokens=4, temperature=0)
    assert made["choices"][0]["text"] == plain["choices"][0]["text"]
    assert llm.source.lanes.reads > 0
    llm.close()


def test_only_the_vocabulary(library: Library) -> None:
    llm = Llama(library.path(NAME), vocab_only=True)
    assert llm.detokenize(llm.tokenize(b"abc")) == b"abc"
    llm.close()


def test_a_pickle_keeps_the_settings(load: Load, library: Library) -> None:
    """As the plain class's, a pickle is a recipe for loading the model again."""
    llm = load(NAME, cache_mb=3, force_cache=True, io_threads=4)
    again = pickle.loads(pickle.dumps(llm))
    assert again.settings == llm.settings and again.n_ctx() == llm.n_ctx()
    np.testing.assert_array_equal(evaluate(again, PROMPTS[0]), library.resident(NAME)[0])
    again.close()


# --- what tools see ---


def test_the_keywords_of_type_checkers_are_the_settings() -> None:
    written = arguments.TARGET.read_text(encoding="utf-8")
    assert written == arguments.render(), "run python tests/support/arguments.py"


def test_the_signature_names_every_keyword() -> None:
    shown = list(inspect.signature(Llama).parameters)
    assert shown[:5] == ["model_path", "cache_mb", "n_ctx", "n_threads", "io_threads"]
    ours = {f for f in routeahead.Settings.__dataclass_fields__}
    theirs = set(inspect.signature(llama_cpp.Llama).parameters) - {"kwargs"}
    assert set(shown) == ours | theirs | {"policies", "outputs", "progress", "cap_context"}
    defaults = {name: p.default for name, p in inspect.signature(Llama).parameters.items()}
    assert defaults["cache_mb"] == "auto" and defaults["n_ctx"] == 512


SCRIPT = """\
from routeahead import Llama

llm = Llama("model.gguf", n_ctx=4096, cache_mb=4000, route_ahead=2)
reveal_type(llm)
reveal_type(llm.settings.cache_mb)
reveal_type(llm.tokenize(b"text"))
reveal_type(llm.counters.decode.hits)
Llama("model.gguf", cache_mb="large")
Llama("model.gguf", cach_mb=4000)
Llama("model.gguf", n_ctx="4096")
"""
SEEN = """\
4: note: Revealed type is "routeahead.engine.llama.Llama"
5: note: Revealed type is "int | Literal['auto']"
6: note: Revealed type is "list[int]"
7: note: Revealed type is "int"
8: error: Argument "cache_mb" to "Llama" has incompatible type
9: error: Unexpected keyword argument "cach_mb" for "Llama"
10: error: Argument "n_ctx" to "Llama" has incompatible type "str"
"""


@pytest.mark.xdist_group("machine")
def test_a_users_script_is_type_checked(tmp_path: Path) -> None:
    """As an installed package, without this repository's configuration."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--hide-error-context", "--no-error-summary",
               "--cache-dir", str(tmp_path), "script.py"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "defined in" not in line]
    assert len(lines) == len(SEEN.splitlines()), done.stdout + done.stderr
    for line, seen in zip(lines, SEEN.splitlines(), strict=True):
        assert line.startswith(f"script.py:{seen}"), done.stdout
