"""Writes what models are measured on, all of it held out: `python training/battery.py FOLDER`.

`battery.jsonl` has tasks with exact answers, `held-out.txt` texts from three sources.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from corpus import Document, documents
from tasks import battery

_SOURCES = ("python", "bible", "wordnet")
_TEXTS, _CHARACTERS = 6, 1200  # of each source: documents, and of each its beginning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=100, help="tasks of each kind")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"prompt": one.prompt, "answer": one.answer.strip(), "kind": one.kind})
        for one in battery(arguments.each)
    ]
    (arguments.folder / "battery.jsonl").write_text("\n".join(lines) + "\n")
    held = [one for one in documents() if one.held]
    (arguments.folder / "held-out.txt").write_text("\n".join(beginnings(held)), encoding="utf-8")


def beginnings(held: list[Document]) -> Iterator[str]:
    """Of documents of each source in turn, so that any stretch of the text has every kind."""
    by_source = [[one for one in held if one.source == source] for source in _SOURCES]
    for turn in itertools.islice(zip(*by_source, strict=False), _TEXTS):
        for one in turn:
            yield one.text[:_CHARACTERS].rpartition("\n")[0] + "\n"


if __name__ == "__main__":
    main()
