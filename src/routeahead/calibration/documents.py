"""What is calibrated on: documents as tokens, some of them held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from routeahead.errors import SettingsError
from routeahead.evaluation.corpus import Vocabulary, read_text

_HOLD_EVERY = 5


@dataclass(frozen=True)
class Stretch:
    """Tokens of one document that fit in the context, evaluated from an empty one."""

    tokens: tuple[int, ...]
    held: bool


def read_documents(paths: Sequence[Path]) -> list[str]:
    """A document a file; of a .jsonl file, a document a line, `{"text": ...}`.

    Raises:
        SettingsError: a file cannot be read or has no text.
    """
    found: list[str] = []
    for path in paths:
        content = read_text(path)
        found += _lines(content, path) if path.suffix == ".jsonl" else [content]
    found = [text for text in found if text.strip()]
    if len(found) < 2:
        raise SettingsError(
            f"{len(found)} document to calibrate on: some must be held out to judge by, so give "
            'several files, or a .jsonl file with {"text": ...} in each line'
        )
    return found


def _lines(content: str, path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise SettingsError(f"{path}, line {number}: not JSON: {error}") from None
        text = fields.get("text") if isinstance(fields, dict) else None
        if not isinstance(text, str):
            raise SettingsError(f'{path}, line {number}: give an object with a "text"')
        texts.append(text)
    return texts


def stretches(
    documents: Sequence[str], vocabulary: Vocabulary, *, context: int, max_tokens: int
) -> list[Stretch]:
    """The first `max_tokens` tokens of the documents. Every fifth document is held out, and the
    last one if there are fewer."""
    found: list[Stretch] = []
    left = max_tokens
    for number, text in enumerate(documents):
        held = number % _HOLD_EVERY == min(_HOLD_EVERY, len(documents)) - 1
        tokens = vocabulary.tokens(text, prompt=False)[:left]
        left -= len(tokens)
        room = context - len(vocabulary.bos)
        for start in range(0, len(tokens), room):
            piece = (*vocabulary.bos, *tokens[start : start + room])
            found.append(Stretch(piece, held))
    if {stretch.held for stretch in found} != {True, False}:
        raise SettingsError(
            f"the first {max_tokens} tokens have no held-out document: raise --max-tokens"
        )
    return found
