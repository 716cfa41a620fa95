"""The page in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from support.chromium import PROGRAM, Page
from support.servers import Server


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM, reason="no Chromium is installed")
def test_the_page_chats_and_shows_the_stream(tmp_path: Path) -> None:
    with Server(tmp_path / "prompts", "--cache-mb", 2, "--route-ahead", 2) as server:
        page = Page(tmp_path / "profile")
        try:
            page.call("Page.navigate", url=server.url)
            page.wait_for("document.querySelectorAll('dd').length > 5")
            page.evaluate("$('text').value = 'What is the capital of France?'; $('send').click()")
            page.wait_for("!!document.querySelector('.note')")
            said = page.evaluate("[...document.querySelectorAll('.message')].map(e => e.innerText)")
            assert said[0] == "What is the capital of France?"
            assert len(said) == 3 and said[1] and "tokens" in said[2]
            page.evaluate("$('text').value = 'Tell me a story'; $('send').click()")
            page.wait_for("document.querySelectorAll('.note').length == 2")
            page.wait_for("document.querySelectorAll('.layer').length > 5")
            # The map has a cell for each expert of each layer, and some are in memory.
            page.wait_for("$('map').width >= 32 && $('map').height >= 12")
            assert page.evaluate(
                "$('map').getContext('2d').getImageData(0, 0, $('map').width, $('map').height)"
                ".data.some(v => v > 0)"
            )
            widths = page.evaluate("[...$('time').children].map(e => parseFloat(e.style.width))")
            assert len(widths) == 3 and sum(widths) == pytest.approx(100, abs=0.5)
            page.screenshot(tmp_path / "page.png")
            assert (tmp_path / "page.png").stat().st_size > 10_000
            assert all(url.startswith((server.url, "data:")) for url in page.requested)
            assert not page.messages
        finally:
            page.close()
