"""The prompt of `run`: where it comes from, and what the model is given of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from routeahead.chat.template import ChatTemplate
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError

TEMPLATE = "tokenizer.chat_template"
STDIN = Path("-")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of -p, of a file, or else of what is piped in; empty if there is none.

    Text is UTF-8 whatever the locale. A mark of that (BOM) and a file's last line break are not a
    part of it. Bytes on the command line that are no UTF-8 are kept as surrogates.

    Raises:
        SettingsError: two of them are given, or the file cannot be read.
    """
    if prompt is not None and file:
        raise SettingsError("give -p or --prompt-file, not both")
    if prompt is not None:
        return os.fsencode(prompt).decode(errors="surrogateescape")
    if file is None:
        if sys.stdin is None or sys.stdin.isatty():
            return ""
        file = STDIN
    try:
        content = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        name = "stdin" if file == STDIN else file
        raise SettingsError(f"{name}: cannot read the prompt: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def tokens(llm: Llama, text: str, *, system: str | None, raw: bool) -> list[int]:
    """The tokens of a question in the model's chat template; those of `text` itself if `raw`.

    A model without a template continues the text.

    Raises:
        SettingsError: there is a system message and no template, or it refuses the messages.
    """
    if not text and system is None:
        return []
    if raw or TEMPLATE not in llm.metadata:
        if system is not None:
            why = "--raw leaves it out" if raw else "the model has none"
            raise SettingsError(f"--system needs the model's chat template, and {why}")
        return llm.tokenize(_bytes(text), add_bos=True, special=True)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return ChatTemplate(llm).prompt(messages, errors="surrogateescape").tokens
    except SettingsError as error:
        raise SettingsError(f"{error}; --raw does without it") from None


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
