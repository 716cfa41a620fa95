"""Prints the table of docs/route-ahead.md from what `routeahead bench --json` wrote.

    python benchmarks/route_ahead_table.py 12.rho-0.6.json 12.rho-0.9.json ...

rho is the time that the baseline's missed bytes take at the throttled bandwidth, divided by its
measured compute time. *kept* is the time by which the token became shorter, divided by the stall
that was removed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from routeahead.bench.runs import Run
from routeahead.bench.statistics import Ratio, spread
from routeahead.bench.summary import SPEED, CellSummary, summarise

HEADER = (
    "| rho | cell | runs | ms/token | compute | stall | of the baseline's | kept "
    "| tok/s of the baseline (99 %) | MiB/token | issuing ms | product ms |"
)


def main() -> None:
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1))
    for path in sys.argv[1:]:
        for row in rows(json.loads(Path(path).read_text())):
            print("| " + " | ".join(row) + " |")


def rows(record: dict[str, Any]) -> list[list[str]]:
    runs = [Run(**run) for run in record["runs"]]
    names = [cell["name"] for cell in record["cells"]]
    summaries = summarise(runs, names, record["baseline"], record["plan"]["warmup"])
    base = next(one for one in summaries if one.name == record["baseline"])
    found = []
    for one in summaries:
        figures = {name: value.median for name, value in one.figures.items()}
        issue, product = (ahead_ms(runs, one.name, name) for name in ("issue", "gemv"))
        found.append(
            [
                f"{rho(record, base):.2f}" if one is base else "",
                one.name,
                str(one.runs),
                f"{figures['ms']:.1f}",
                f"{figures['compute_ms']:.1f}",
                f"{figures['stall_ms']:.1f}",
                *compared(one, base),
                f"{figures['mib_per_token']:.1f}",
                issue,
                product,
            ]
        )
    return found


def rho(record: dict[str, Any], base: CellSummary) -> float:
    cell = next(cell for cell in record["cells"] if cell["name"] == base.name)
    throttle = re.search(r"--throttle (\S+)", " ".join(cell["flags"]))
    assert throttle, f"{base.name} is not throttled"
    read_ms = 1e3 * base.figures["mib_per_token"].median / float(throttle[1])
    return read_ms / base.figures["compute_ms"].median


def compared(one: CellSummary, base: CellSummary) -> list[str]:
    """Share of the baseline's stall, how much of the removed stall was kept, and speed."""
    if one is base:
        return ["", "", ""]
    stall, was = one.figures["stall_ms"].median, base.figures["stall_ms"].median
    shorter = base.figures["ms"].median - one.figures["ms"].median
    kept = f"{shorter / (was - stall):.2f}" if was - stall > 1 else "-"
    speed = one.ratios[SPEED]
    assert isinstance(speed, Ratio), speed
    interval = f" ({speed.low:.3f}..{speed.high:.3f})" if speed.low and speed.high else ""
    return [f"{stall / was:.0%}", kept, f"{speed.median:.3f}{interval}"]


def ahead_ms(runs: list[Run], cell: str, name: str) -> str:
    """Median over runs of one of route-ahead's own costs, in ms a token."""
    values = [
        run.report["route_ahead"][f"{name}_ms_per_tok"]
        for run in runs
        if run.cell == cell and not run.error and "route_ahead" in run.report
    ]
    return f"{spread(values).median:.2f}" if values else ""


if __name__ == "__main__":
    main()
