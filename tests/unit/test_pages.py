"""Links in the documentation lead to files that are there, and to headings that are in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub and mkdocs make them of its headings."""
    found = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists() and path.is_relative_to(ROOT), link
        assert not anchor or anchor in headings(path), link


def test_each_page_is_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}" not in nav]
    assert not missing, "name it in the nav of mkdocs.yml"
