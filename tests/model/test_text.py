"""Text of any kind: long tokens, separators of Unicode, names that are not UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_parts import take_apart
from support.library import Library

from routeahead import Llama, ModelError, ReadError, SettingsError
from routeahead.errors import visible
from routeahead.evaluation.corpus import open_vocabulary, read_prompts

LONG = b"a" * 33 + b"\xc3\xa9" * 40  # 113 bytes


def test_tokens_longer_than_32_bytes_are_spelt_out(library: Library, tmp_path: Path) -> None:
    parts = take_apart(library.path("qwen3moe"))
    name = "tokenizer.ggml.tokens"
    tokens, kinds = parts.value(name), parts.value("tokenizer.ggml.token_type")
    tokens = [*tokens[:-1], LONG]  # instead of the token of byte 255, whose type changes too
    parts = parts.change(name, tokens, 9, 8)
    parts = parts.change("tokenizer.ggml.token_type", [*kinds[:-1], 1], 9, 5)
    parts = parts.change(name, [b"<0xFF>" if t == b"<unk>" else t for t in tokens], 9, 8)
    llm = Llama(parts.write(tmp_path / "long.gguf"), n_ctx=64, n_threads=1, cache_mb=0)
    last = len(tokens) - 1
    assert llm.detokenize([last]) == LONG
    assert llm.detokenize([100, last, 101]) == b"a" + LONG + b"b"
    llm.close()


def test_prompts_may_hold_line_separators_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "one\u2028two\u2029three\x85four\x0bfive"
    lines = [f'{{"prompt": "{text}", "answer": "yes"}}'.replace("\x0b", "\\u000b"), "", "   "]
    path.write_bytes("\r\n".join([*lines, '{"prompt": "p", "answer": "a"}', ""]).encode())
    assert [p.prompt for p in read_prompts(path)] == [text, "p"]
    path.write_text('{"prompt": "p", "answer": "a"}\n\n{"prompt": 1}\n')
    with pytest.raises(SettingsError, match="line 3"):
        read_prompts(path)


NOT_UTF8 = b"caf\xe9.gguf"


def test_a_model_whose_name_is_not_utf8(library: Library, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(NOT_UTF8)
    shutil.copy(library.path("qwen3moe"), path)
    for resident in (False, True):
        llm = Llama(path, n_ctx=64, n_threads=1, **({"resident": True} if resident else {}))
        llm.eval([5])
        llm.close()
    with open_vocabulary(path) as vocabulary:
        assert vocabulary.size == 259
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"caf\\udce9\.gguf"):
        Llama(path)


def test_a_model_whose_name_is_not_in_the_locale(library: Library, tmp_path: Path) -> None:
    """In a Latin-1 locale, Python decodes a UTF-8 name to other characters; the bytes stay."""
    path = tmp_path / "café.gguf"
    shutil.copy(library.path("qwen3moe"), path)
    script = (
        "import sys; from pathlib import Path; from routeahead import Llama\n"
        "path = next(Path(sys.argv[1]).glob('caf*.gguf'))\n"
        "Llama(path, n_ctx=64, n_threads=1, cache_mb=0).eval([5])\n"
    )
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C"}):
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path], env={**os.environ, **locale},
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [ModelError, ReadError, SettingsError])
def test_messages_hold_nothing_that_a_terminal_obeys(error: Callable[[str], Exception]) -> None:
    said = str(error("\x1b[31mred\x07 a\nb \udce9 \u202e é世"))
    assert said == r"\x1b[31mred\x07 a\nb \udce9 \u202e é世"


def test_what_is_printable_stays() -> None:
    assert visible("a é 世 🙂") == "a é 世 🙂"


def test_numba_told_not_to_compile_is_one_line(library: Library) -> None:
    script = "import sys; from routeahead import Llama; Llama(sys.argv[1], n_ctx=64, n_threads=1)"
    done = subprocess.run(
        [sys.executable, "-c", script, library.path("qwen3moe")],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith("NUMBA_DISABLE_JIT is set, but streaming needs numba: unset it")
