"""`routeahead report`: a page of recorded runs, read by a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import polars as pl
import pytest
from support.chromium import PROGRAM, Page
from support.commands import Command

ASK = ("run", "-p", "What is the capital of France?", "-n", "4", "-t", "1", "--cache-mb", "2")


@pytest.fixture
def recorded(tmp_path: Path, command: Command) -> list[Path]:
    """Two runs in folders; one's name would be markup, a formula or a hidden legend elsewhere."""
    folders = [tmp_path / "_<b>$x^$", tmp_path / "ahead"]
    for folder, flags in zip(folders, ([], ["--route-ahead", "2"]), strict=True):
        folder.mkdir()
        files = ["--report", folder / "run.json", "--io-trace", folder / "reads.csv"]
        files += ["--route-trace", folder / "routes.parquet", "--csv", folder / "steps.csv"]
        done = command(*ASK, *flags, *files)
        assert done.returncode == 0, done.stderr
    return folders


class Links(HTMLParser):
    """What a page would ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        assert tag not in ("script", "iframe", "object", "embed")


def test_a_page_of_two_runs(tmp_path: Path, command: Command, recorded: list[Path]) -> None:
    page = tmp_path / "page.html"
    done = command("report", *recorded, "-o", page)
    assert done.returncode == 0 and f"wrote {page}" in done.stderr
    text = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;$x^$" in text and "<b>" not in text
    links = Links()
    links.feed(text)
    assert links.found and all(link.startswith(("#", "data:")) for link in links.found)
    assert not re.search(r"@import|url\((?!#)", text)
    shown = ["Time of each token", "Hit rate against cache size", "Agreement with the router"]
    shown += ["Where the time of a token went", "The reads of one token", "Which experts were used"]
    assert all(heading in text for heading in shown)
    assert text.count("<svg") == 3 + 2 * 3
    assert "committed (" in text and "route_ahead" in text
    if PROGRAM:
        _look(page, tmp_path)

    # Nothing is left of a page that cannot be made, and no input is written over.
    refused = command("report", recorded[0], "--token", 9999, "-o", tmp_path / "none.html")
    assert refused.returncode == 1 and "--token 9999" in refused.stderr
    assert not (tmp_path / "none.html").exists()
    reads = recorded[0] / "reads.csv"
    assert command("report", reads, "-o", reads).returncode == 1
    assert command("report", reads, "-o", page).returncode == 0  # any of the files will do

    # The traces are tables for others, too.
    for frame in (pl.read_csv(reads), pd.read_csv(reads)):
        assert {"time_s", "lane", "kind", "bytes", "latency_s"} <= set(frame.columns)
    routes = recorded[1] / "routes.parquet"
    assert pl.read_parquet(routes)["committed"].sum() == pd.read_parquet(routes)["committed"].sum()


def _look(page: Path, tmp_path: Path) -> None:
    browser = Page(tmp_path / "profile")
    try:
        browser.call("Page.navigate", url=page.as_uri())
        browser.wait_for("document.readyState == 'complete' && !!document.querySelector('.run')")
        sizes = browser.evaluate(
            "[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect())"
            ".map(r => [r.width, r.height])"
        )
        assert all(width > 500 and height > 100 for width, height in sizes)
        assert all(url.startswith(("file:", "data:")) for url in browser.requested)
        assert not browser.messages
    finally:
        browser.close()
