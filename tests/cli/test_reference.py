"""docs/cli.md is what the parser says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_of_commands_is_the_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    page = importlib.import_module("cli_reference").page()
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == page, "run: python tools/cli_reference.py docs/cli.md"
    for text in ("## serve", "`--cache-mb SIZE`", "`--dense {anon,mmap}`", "**Sampling**"):
        assert text in page
