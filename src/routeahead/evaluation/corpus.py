"""What a model is graded on: a text or prompts, as tokens, in pieces that fit the context."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from routeahead.errors import ModelError, SettingsError
from routeahead.experts.packed import ARCHITECTURE
from routeahead.llamacpp.gguf_file import read_layout

OPENING_TOKENS = 64
"""Tokens of the text that a long generation continues, if the context has room for as many."""
_SPARE_TOKENS = 16
"""Tokens of an answer beyond one a byte: white space before it, and the end of the word."""


@dataclass(frozen=True)
class Chunk:
    """A stretch of text. Position i of `inputs` predicts `targets[i]`; both are equally long."""

    name: str
    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def work(self) -> int:
        """Tokens to evaluate."""
        return len(self.inputs)


@dataclass(frozen=True)
class Question:
    """A prompt whose continuation must start with `answer` within `limit` tokens."""

    name: str
    prompt: tuple[int, ...]
    answer: str
    kind: str
    limit: int

    @property
    def work(self) -> int:
        """Tokens to evaluate at most."""
        return len(self.prompt) + self.limit


@dataclass(frozen=True)
class Opening:
    """A prompt to continue greedily for up to `limit` tokens."""

    name: str
    prompt: tuple[int, ...]
    limit: int

    @property
    def work(self) -> int:
        """Tokens to evaluate at most."""
        return len(self.prompt) + self.limit


Piece = Chunk | Question | Opening


@dataclass(frozen=True)
class Prompt:
    """A line of a prompts file."""

    prompt: str
    answer: str
    kind: str


class Vocabulary:
    """The tokeniser of a model that the caller keeps loaded."""

    def __init__(self, model: Any) -> None:
        """`model` is a `llama_model` pointer, as in `Llama.model`."""
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size = int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    @property
    def bos(self) -> tuple[int, ...]:
        """The token that this model expects before a text; () if it expects none."""
        if not llama_cpp.llama_vocab_get_add_bos(self._vocab):
            return ()
        return (int(llama_cpp.llama_vocab_bos(self._vocab)),)

    def tokens(self, text: str, *, prompt: bool) -> list[int]:
        """Tokens of `text`.

        A prompt gets the model's special tokens, and their names in it are read as such; in a text
        they are plain characters.
        """
        data = text.encode()
        room = len(data) + 2  # usually enough: a token a byte, and one at each end
        while True:
            out = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), out, room, prompt, prompt
            )
            if count >= 0:
                return list(out[:count])
            room = -count

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without a last character that is not complete yet."""
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        room = 16 * len(tokens)
        while True:
            out = ctypes.create_string_buffer(room)
            count = llama_cpp.llama_detokenize(
                self._vocab, ids, len(tokens), out, room, False, False
            )
            if count >= 0:
                return codecs.getincrementaldecoder("utf-8")("replace").decode(out.raw[:count])
            room = -count

    def ends(self, token: int) -> bool:
        """Whether a generation ends at `token`."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))


@contextlib.contextmanager
def open_vocabulary(path: Path) -> Iterator[Vocabulary]:
    """The vocabulary of a GGUF file, without its weights.

    Raises:
        ModelError: llama.cpp cannot read it.
    """
    # As `Llama(verbose=False)` does, which has not been called yet.
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    layout = read_layout(path)
    if layout.packed:
        params.kv_overrides = _architecture(layout.arch)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelError(f"{path}: llama.cpp cannot read its vocabulary")
    try:
        yield Vocabulary(model)
    finally:
        llama_cpp.llama_model_free(model)


def _architecture(name: str) -> Any:
    """For the parameters of a load: what architecture the file is to have, whatever it says."""
    overrides: Any = (llama_cpp.llama_model_kv_override * 2)()  # the second one ends the list
    overrides[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].key, overrides[0].value.val_str = ARCHITECTURE.encode(), name.encode()
    return overrides


def read_text(path: Path) -> str:
    """The content of a UTF-8 file.

    Raises:
        SettingsError: the file cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8: {error}") from None


def read_prompts(path: Path) -> list[Prompt]:
    """Reads JSON lines of `{"prompt": ..., "answer": ..., "kind": ...}`; `kind` may be absent.

    Raises:
        SettingsError: the file cannot be read, a line is malformed, or there is no line.
    """
    # Not splitlines: JSON may have line separators of Unicode inside a text, unescaped.
    lines = enumerate(read_text(path).split("\n"), start=1)
    prompts = [
        _parse_prompt(line, f"{path}, line {number}") for number, line in lines if line.strip()
    ]
    if not prompts:
        raise SettingsError(f"{path}: no prompt in it")
    return prompts


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise SettingsError(f'{where}: give an object with "prompt" and "answer"')
    for key in ("prompt", "answer"):
        value = fields.get(key)
        if not isinstance(value, str) or not value.strip():
            raise SettingsError(f'{where}: "{key}" must be a text that is not empty')
    kind = fields.get("kind", "")
    if not isinstance(kind, str):
        raise SettingsError(f'{where}: "kind" must be a text')
    return Prompt(fields["prompt"], fields["answer"].strip(), kind)


def chunks(
    text: Sequence[int], bos: tuple[int, ...], *, context: int, max_tokens: int
) -> list[Chunk]:
    """Cuts the first `max_tokens` tokens of `text` into chunks that fit in `context` tokens.

    Each token is graded once. A chunk is evaluated from an empty context, behind `bos`; without a
    `bos` the first token of the text is not graded, because nothing predicts it.

    Raises:
        SettingsError: there is nothing to grade.
    """
    skipped = 0 if bos else 1
    graded = text[skipped : skipped + max_tokens]
    if not graded:
        raise SettingsError("the text has no token to grade")
    result = []
    for number, start in enumerate(range(0, len(graded), context)):
        targets = tuple(graded[start : start + context])
        before = bos or (text[start],)
        result.append(Chunk(f"text-{number:05}", (*before, *targets[:-1]), targets))
    return result


def questions(prompts: Sequence[Prompt], vocabulary: Vocabulary, context: int) -> list[Question]:
    """The prompts as tokens, each with a limit for its answer.

    Raises:
        SettingsError: a prompt does not fit in `context` with its answer.
    """
    result = []
    for number, item in enumerate(prompts):
        limit = len(item.answer.encode()) + _SPARE_TOKENS
        tokens = vocabulary.tokens(item.prompt, prompt=True)
        _check_fits(f"prompt {number + 1}", tokens, limit, context)
        name = f"answer-{number:05}"
        result.append(Question(name, tuple(tokens), item.answer, item.kind, limit))
    return result


def openings(prompts: Sequence[Sequence[int]], limit: int, context: int) -> list[Opening]:
    """The prompts to continue for `limit` tokens.

    Raises:
        SettingsError: a prompt does not fit in `context` with the tokens to generate.
    """
    result = []
    for number, tokens in enumerate(prompts):
        _check_fits(f"the generation from prompt {number + 1}", tokens, limit, context)
        result.append(Opening(f"generate-{number:05}", tuple(tokens), limit))
    return result


def _check_fits(what: str, prompt: Sequence[int], limit: int, context: int) -> None:
    if len(prompt) + limit > context:
        raise SettingsError(
            f"{what} needs {len(prompt)} + {limit} tokens and the context has {context}: "
            "raise --context"
        )
