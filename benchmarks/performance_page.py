"""Writes the tables of docs/performance.md.

    python benchmarks/performance_page.py docs [RECORD.json ...]

Records are what prompt.py, filling.py, pack.py and `routeahead bench --json` wrote: what is shown
of them is kept in docs/performance. A record's name begins with what it is of (`prompt-48.json`),
and the page has a place for each of these. Nothing is measured here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median as middle
from typing import Any

from page_blocks import markdown, median, speed, write

from routeahead.bench.statistics import paired_ratio
from routeahead.telemetry.json_file import write_json

COLUMNS = {
    "ms": "ms/token", "compute_ms": "compute", "stall_ms": "stall", "mgmt_ms": "management",
    "mib_per_token": "MiB", "reads": "reads",
}  # fmt: skip
SUBJECTS = ("prompt", "eviction", "mmap", "filling", "pack", "packed")


def main() -> None:
    docs = Path(sys.argv[1])
    for record in map(Path, sys.argv[2:]):
        subject_of(record)
        found = json.loads(record.read_text(encoding="utf-8"))
        bench = isinstance(found, dict) and "summary" in found
        write_json(docs / "performance" / record.name, found["summary"] if bench else found)
    for subject, content in tables(docs).items():
        write(docs / "performance.md", subject, content)


def subject_of(record: Path) -> str:
    subject = re.split(r"[^a-z]", record.stem)[0]
    if subject not in SUBJECTS:
        raise SystemExit(f"{record.name}: a record's name begins with {', '.join(SUBJECTS)}")
    return subject


def tables(docs: Path) -> dict[str, str]:
    """The page's blocks: what the records of each subject say."""
    records: dict[str, dict[str, Any]] = {subject: {} for subject in SUBJECTS}
    for path in sorted((docs / "performance").glob("*.json"), key=in_order):
        records[subject_of(path)][path.stem] = json.loads(path.read_text(encoding="utf-8"))
    of = {"prompt": prompt_table, "filling": filling_table, "pack": pack_table}
    return {
        subject: of.get(subject, cell_tables)(found) if found else "*Not measured yet.*"
        for subject, found in records.items()
    }


def in_order(path: Path) -> list[tuple[int, str]]:
    """A sorting key by which 500 is before 1000."""
    return [
        (int(part or 0) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path.stem)
    ]


def prompt_table(records: dict[str, Any]) -> str:
    """A row a cell of prompt.py."""
    header = (
        "layers", "tokens", "disk", "cache", "ubatch", "passes", "to first token", "waiting",
        "MiB read", "resident", "of the bound", "of resident", "before",
    )  # fmt: skip
    rows = []
    for one in rows_of(records):
        passes = one["passes"]
        streamed, before, resident = (passes.get(n) for n in ("streamed", "before", "resident"))
        rows.append(
            (
                f"{one['layers']}",
                f"{one['rows']:,}{' of a text' if one['text'] else ''}",
                disk(one["throttle"]),
                f"{one['cache_mb']:,} MiB",
                f"{one['ubatch']:,}",
                f"{len(streamed)}",
                seconds(streamed),
                f"{middle(p['stall_s'] for p in streamed):.2f} s",
                mib(streamed),
                seconds(resident) if resident else "does not fit",
                spread(one["of_bound"]),
                spread(one["of_compute"]) if resident else "",
                f"{seconds(before)}, {mib(before)} MiB" if before else "",
            )
        )
    return markdown(header, rows)


def filling_table(records: dict[str, Any]) -> str:
    """A row a start of filling.py."""
    header = (
        "layers", "disk", "cache", "tokens", "before: rest, prompt", "pairs", "not filling",
        "filling", "speed ×", "of as many after them ×", "MiB read meanwhile: not, filling",
    )  # fmt: skip
    rows = []
    for one in rows_of(records):
        for start, runs in one["runs"].items():
            off, on = runs["off"], runs["on"]
            pause, _, prompt = start.partition(":")
            rows.append(
                (
                    f"{one['layers']}",
                    disk(one["throttle"]),
                    f"{one['cache_mb']:,} MiB" if one["cache_mb"] else "all experts",
                    f"{one['tokens']}",
                    f"{float(pause):g} s, {prompt or 1}",
                    f"{len(on)}",
                    seconds(off),
                    seconds(on),
                    times(off, on, "s"),
                    times(off, on, "later_s") if "later_s" in on[0] else "",
                    f"{mib(off)}, {mib(on)}",
                )
            )
    return markdown(header, rows)


def pack_table(records: dict[str, Any]) -> str:
    """A row a cell of pack.py."""
    header = (
        "disk",
        "lanes",
        "an expert",
        "pairs",
        "apart",
        "side by side",
        "apart / side by side",
    )
    rows = []
    for one in rows_of(records):
        apart, together = (one["ms"][way] for way in ("apart", "together"))
        ratio = paired_ratio(apart, together)
        rows.append(
            (
                disk(one["throttle"]),
                f"{one['lanes']}",
                f"3 × {one['kib']} KiB",
                f"{ratio.pairs}",
                f"{middle(apart):.2f} ms",
                f"{middle(together):.2f} ms",
                f"{ratio.median:.2f}" + interval(ratio.low, ratio.high),
            )
        )
    return markdown(header, rows)


def cell_tables(records: dict[str, Any]) -> str:
    """A table a record of `routeahead bench`: a row a cell."""
    named = len(records) > 1
    return "\n\n".join(
        (f"*{name}*\n\n" if named else "") + cell_table(summary)
        for name, summary in records.items()
    )


def cell_table(summary: Sequence[dict[str, Any]]) -> str:
    """A row a cell of `routeahead bench`; speeds over the first cell's, paired."""
    columns = [name for name in COLUMNS if any(name in cell["figures"] for cell in summary)]
    rows = []
    for cell in summary:
        figures = [
            f"{median(cell, name):.1f}" if name in cell["figures"] else "" for name in columns
        ]
        rows.append((cell["name"], str(cell["runs"]), speed(cell), *figures))
    return markdown(("cell", "runs", "tokens/s ×", *map(COLUMNS.__getitem__, columns)), rows)


def rows_of(records: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All cells of records that are lists of cells."""
    for record in records.values():
        yield from record


def times(off: Sequence[dict[str, float]], on: Sequence[dict[str, float]], key: str) -> str:
    ratio = paired_ratio(*([run[key] for run in of] for of in (off, on)))
    return f"{ratio.median:.2f}" + interval(ratio.low, ratio.high)


def disk(throttle: float) -> str:
    return f"{throttle:g} MiB/s" if throttle else "unthrottled"


def seconds(runs: Sequence[dict[str, float]]) -> str:
    return f"{middle(one['s'] for one in runs):.1f} s"


def mib(runs: Sequence[dict[str, float]]) -> str:
    return f"{middle(one['mib'] for one in runs):,.0f}"


def spread(values: Sequence[float]) -> str:
    return f"{middle(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def interval(low: float | None, high: float | None) -> str:
    return f" ({low:.2f}..{high:.2f})" if low is not None and high is not None else ""


if __name__ == "__main__":
    main()
