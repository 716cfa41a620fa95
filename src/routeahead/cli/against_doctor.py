"""`routeahead bench --against-doctor`: whether runs lay where the doctor said they would."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from routeahead.bench.cells import Cell, expand_shares, is_run
from routeahead.bench.runs import Bench
from routeahead.bench.summary import SPEED, CellSummary
from routeahead.cli.flags import llama_kwargs
from routeahead.cli.open_model import DEFAULT_CONTEXT
from routeahead.cli.terminal import Column, print_table
from routeahead.config import Settings
from routeahead.doctor.examination import Examination, examine
from routeahead.errors import SettingsError


def forecasts(benchmark: Bench) -> dict[str, Examination]:
    """Cell → what the doctor says of it.

    Raises:
        SettingsError: a cell is another program, or has flags that the doctor has no model of.
        ModelError: the model cannot be used.
    """
    return {cell.name: _forecast(benchmark, cell) for cell in benchmark.cells.cells}


def _forecast(benchmark: Bench, cell: Cell) -> Examination:
    if not is_run(cell):
        raise SettingsError(f"cell {cell.name!r}: the doctor knows `routeahead run` alone")
    print(f"doctor: {cell.name}", file=sys.stderr, flush=True)
    plan, flags = benchmark.plan, expand_shares(cell.flags, benchmark.layout)
    settings = Settings(**llama_kwargs(" ".join(flags))).validate()
    return examine(
        benchmark.layout.shards[0].path,
        settings,
        threads=plan.threads,
        context=DEFAULT_CONTEXT,
        warmup=plan.warmup,
        tokens=plan.tokens,
    )


def show(found: dict[str, Examination], summaries: Sequence[CellSummary]) -> None:
    """A line a cell: forecast, run, and whether one lay in the other."""
    rows = [verdict(found[one.name], one) for one in summaries]
    columns = [
        Column("band tok/s", [row["band"] for row in rows]),
        Column("run", [row["run"] for row in rows]),
        Column("it lay", [row["lay"] for row in rows], left=True),
        Column("hits, forecast", [row["hits"] for row in rows]),
        Column("run", [row["run_hits"] for row in rows]),
    ]
    print()
    print_table("against the doctor", [one.name for one in summaries], columns)


def verdict(found: Examination, summary: CellSummary) -> dict[str, Any]:
    """The texts of a cell's line."""
    told, measured = found.forecast, summary.figures
    if not (told and found.traffic):
        lay = "no forecast" if found.memory.fits else "it does not run"
        return dict.fromkeys(("band", "run", "hits", "run_hits"), "-") | {"lay": lay}
    row = {
        "band": f"{told.decode.low:.2f}..{told.decode.high:.2f}",
        "hits": f"{found.traffic.hit_rate:.1%}",
    }
    if SPEED not in measured:
        return row | {"run": "-", "run_hits": "-", "lay": "no run"}
    speed = measured[SPEED].median
    hits = f"{measured['hit_rate'].median:.1%}" if "hit_rate" in measured else "-"
    lay = "inside" if speed in told.decode else "below" if speed < told.decode.low else "above"
    return row | {"run": f"{speed:.2f}", "run_hits": hits, "lay": lay}
