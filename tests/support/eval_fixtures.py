"""Fixtures of the tests of `routeahead eval`: a plugin, named in their `pytest_plugins`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeahead.evaluation.evaluate import Request
from support.evaluations import CONTEXT, TEXT, continuation
from support.library import Library


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def request_on(library: Library, text: Path) -> Callable[..., Request]:
    def build(name: str = "qwen3moe", **more: Any) -> Request:
        given: dict[str, Any] = {"text": text, "context": CONTEXT, "threads": 1}
        return Request(library.path(name), **given | more)

    return build


@pytest.fixture
def prompts(tmp_path: Path, library: Library) -> Path:
    """Of mixtral: what it says, which counts, and what no model says, in two kinds."""
    text = continuation(library.path("mixtral"), "hello", 16)
    ends = [end for end in range(3, len(text)) if re.match(r"[^\w\s\ufffd]", text[end - 1])]
    lines = [
        {"prompt": "hello", "answer": text[: ends[0]], "kind": "known"},
        {"prompt": "hello", "answer": "no model says this", "kind": "unknown"},
        {"prompt": "2+2=", "answer": "no model says this", "kind": "known"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path
