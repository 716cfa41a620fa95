"""Blocks of pages that are written from records: `<!-- mark -->` to `<!-- end -->`, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(path: Path, mark: str, content: str) -> None:
    """Replaces what stands between `<!-- mark -->` and `<!-- end -->`.

    Raises:
        SystemExit: the page has no such place.
    """
    block = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, found = block.subn(
        lambda at: f"{at[1]}{content}\n{at[2]}", path.read_text(encoding="utf-8")
    )
    if not found:
        raise SystemExit(f"{path}: put <!-- {mark} --> and <!-- end --> where its tables go")
    path.write_text(text, encoding="utf-8")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def median(cell: dict[str, Any], figure: str) -> float:
    """Of a figure of a cell in the summary that `routeahead bench --json` wrote."""
    return float(cell["figures"][figure]["median"])


def speed(cell: dict[str, Any]) -> str:
    """A cell's tokens/s over the baseline's, with its interval if there were enough pairs."""
    ratio = cell["ratios"].get("tok_per_s")
    if ratio is None:  # the baseline
        return f"1 ({median(cell, 'tok_per_s'):.1f}/s)"
    interval = f" ({ratio['low']:.2f}..{ratio['high']:.2f})" if ratio.get("low") else ""
    return f"{ratio['median']:.2f}{interval}"
