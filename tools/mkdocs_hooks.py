"""What the site needs beside docs/: the pages at the repository's root, and links that lead out.

The README is the site's first page. On the site, a link from a page to a file that is no page (a
source file, an example) is plain text; mkdocs is told of those whose file is missing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.links")


def on_files(files: Any, config: Any) -> Any:
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    folder = (ROOT / PAGES[name] if name in PAGES else ROOT / "docs" / name).parent

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        if path in (ROOT / source for source in PAGES.values()):
            here = next(n for n, source in PAGES.items() if ROOT / source == path)
            return f"[{text}]({here}{anchor})"
        if not path.exists():
            _log.warning("%s: links to %s, which is not there", name, target)
        return text

    return _LINK.sub(linked, markdown)
