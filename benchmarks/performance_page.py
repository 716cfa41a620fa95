"""Writes the tables of docs/performance.md.

    python benchmarks/performance_page.py docs [RECORD.json ...]

Records are what prompt.py (`prompt*.json`) and `routeahead bench --json` (any other name) wrote:
what is shown of them is kept in docs/performance. Nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median as middle
from typing import Any

from page_blocks import markdown, median, speed, write

from routeahead.telemetry.json_file import write_json

COLUMNS = ("ms", "compute_ms", "stall_ms", "mgmt_ms", "mib_per_token")


def main() -> None:
    docs = Path(sys.argv[1])
    kept = docs / "performance"
    for record in map(Path, sys.argv[2:]):
        found = json.loads(record.read_text())
        write_json(kept / record.name, found if isinstance(found, list) else found["summary"])
    page = docs / "performance.md"
    for path in sorted(kept.glob("*.json")):
        records = json.loads(path.read_text())
        table = prompt_table(records) if path.stem.startswith("prompt") else cell_table(records)
        write(page, path.stem, table)


def prompt_table(records: Sequence[dict[str, Any]]) -> str:
    """A row a cell of prompt.py."""
    header = (
        "tokens", "disk", "cache", "to first token", "resident", "MiB read", "of the bound",
        "of resident", "ubatches of 512, no reads ahead",
    )  # fmt: skip
    rows = []
    for one in records:
        passes = one["passes"]
        before = passes.get("before")
        rows.append(
            (
                f"{one['rows']:,}",
                f"{one['throttle']} MiB/s" if one["throttle"] else "unthrottled",
                f"{one['cache_mb']} MiB",
                seconds(passes["streamed"]),
                seconds(passes["resident"]) if "resident" in passes else "",
                f"{middle(p['mib'] for p in passes['streamed']):,.0f}",
                spread(one["of_bound"]),
                spread(one["of_compute"]) if "resident" in passes else "",
                f"{seconds(before)}, {middle(p['mib'] for p in before):,.0f} MiB" if before else "",
            )
        )
    return markdown(header, rows)


def seconds(passes: Sequence[dict[str, float]]) -> str:
    return f"{middle(one['s'] for one in passes):.1f} s"


def spread(values: Sequence[float]) -> str:
    return f"{middle(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def cell_table(summary: Sequence[dict[str, Any]]) -> str:
    """A row a cell of `routeahead bench`; speeds over the first cell's, paired."""
    header = ("cell", "runs", "tokens/s ×", "ms/token", "compute", "stall", "management", "MiB")
    rows = []
    for cell in summary:
        figures = [
            f"{median(cell, name):.1f}" if name in cell["figures"] else "" for name in COLUMNS
        ]
        rows.append((cell["name"], str(cell["runs"]), speed(cell), *figures))
    return markdown(header, rows)


if __name__ == "__main__":
    main()
