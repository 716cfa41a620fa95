"""`routeahead bench`: compares ways to run a model, in turn and by fresh processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from routeahead.bench.cells import CellList, parse_cell, read_cells
from routeahead.bench.runs import Bench, Plan, Run
from routeahead.bench.statistics import LEAST_PAIRS, Ratio, Spread
from routeahead.bench.summary import COMPARED, SPEED, CellSummary, figures, summarise
from routeahead.cli import options
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.models import DEFAULT_MODEL
from routeahead.telemetry.json_file import write_json

# A table is never squeezed into less when its lines go to a file.
_FILE_WIDTH = 160

# figure → (heading, factor, decimals)
_COLUMNS = {
    SPEED: ("tok/s", 1, 2),
    "ms": ("ms/token", 1, 1),
    "compute_ms": ("compute ms", 1, 1),
    "stall_ms": ("stall ms", 1, 1),
    "adopt_ms": ("of it adoption", 1, 1),
    "mgmt_ms": ("management ms", 1, 2),
    "mib_per_token": ("MiB/token", 1, 1),
    "mib_per_s": ("MiB/s", 1, 0),
    "hit_rate": ("hits %", 100, 1),
    "miss_rate": ("misses %", 100, 1),
}


def bench(
    model: options.Model = DEFAULT_MODEL,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:FLAGS",
            help="Cell: flags of `run`, as in 'none:--cache-mb 0'. Before the flags may stand "
            "VARIABLE=value and another program; {25%} is that share of the experts in MiB. "
            "Give it once for each.",
        ),
    ] = None,
    cells: Annotated[
        Path | None,
        typer.Option(help="File with a cell a line, below a # line that states the question."),
    ] = None,
    passes: Annotated[
        int, typer.Option(min=1, help=f"Runs of each cell; a claim needs {LEAST_PAIRS}.")
    ] = Plan.passes,
    tokens: Annotated[int, typer.Option(min=1, help="Decoded tokens that count.")] = Plan.tokens,
    warmup: Annotated[
        int, typer.Option(min=0, help="Decoded tokens before them that do not.")
    ] = Plan.warmup,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, help="Compute threads.", show_default="free cores"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the tokens fed and of the order of the cells.")
    ] = Plan.seed,
    baseline: Annotated[
        str | None,
        typer.Option(help="Cell to compare the others with.", show_default="the first"),
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="MIB", min=1, help="Memory a run may use, page cache included (Linux cgroup)."
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write everything, raw, to this file.")
    ] = None,
) -> None:
    """Compare ways to run a model: every cell in every pass, in changing order, on the same tokens.

    Each run is a fresh process that starts without the model in the page cache.

    Exit status 1 if a run failed, 130 if interrupted; what was measured is shown all the same.
    """
    if as_json and not as_json.parent.is_dir():
        raise SettingsError(f"{as_json}: no such folder")
    plan = Plan(
        passes=passes,
        tokens=tokens,
        warmup=warmup,
        threads=threads or default_threads(),  # the same for all runs
        seed=seed,
        memory_limit=memory_limit * MIB if memory_limit else None,
    )
    benchmark = Bench(read_layout(model), _cells(cell, cells), plan, baseline)
    interrupted = _run(benchmark, as_json)
    _show(benchmark, _summaries(benchmark))
    if interrupted:
        raise typer.Exit(130)
    if any(run.error for run in benchmark.runs):
        raise typer.Exit(1)


def _cells(given: list[str] | None, file: Path | None) -> CellList:
    if given and file:
        raise SettingsError("give --cell or --cells, not both")
    return read_cells(file) if file else CellList("", [parse_cell(text) for text in given or []])


def _run(benchmark: Bench, as_json: Path | None) -> bool:
    """Runs everything, with a line on stderr for each run; True if interrupted."""
    try:
        for run in benchmark:
            _write(benchmark, as_json)  # each time: hours of runs survive whatever happens
            place = f"[{len(benchmark.runs)}/{len(benchmark)}] pass {run.pass_index + 1}"
            outcome = _outcome(run, benchmark.plan.warmup)
            print(f"{place}, {run.cell}: {outcome}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        _write(benchmark, as_json)
        return True
    return False


def _write(benchmark: Bench, path: Path | None) -> None:
    if path:
        summary = [one.as_dict() for one in _summaries(benchmark)]
        write_json(path, benchmark.as_dict() | {"summary": summary})


def _summaries(benchmark: Bench) -> list[CellSummary]:
    names = [cell.name for cell in benchmark.cells.cells]
    return summarise(benchmark.runs, names, benchmark.baseline, benchmark.plan.warmup)


def _outcome(run: Run, warmup: int) -> str:
    if run.error:
        return f"failed: {run.error}"
    text = (
        f"{figures(run.report, warmup)[SPEED]:.2f} tok/s, "
        f"disk {run.machine['disk']['mib_per_s']:.0f} MiB/s, "
        f"others took {run.others_cpu_s / run.wall_s:.1f} cores"
    )
    left = run.page_cache["left_bytes"]
    return f"{text}, {left // MIB} MiB stayed in the page cache" if left else text


def _show(benchmark: Bench, summaries: Sequence[CellSummary]) -> None:
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if benchmark.cells.question:
        console.print(benchmark.cells.question, markup=False)
    console.print(_figure_table(summaries))
    if len(summaries) > 1:
        console.print(_ratio_table(summaries, benchmark.baseline))
    for one in summaries:
        if one.errors:
            text = f"{one.name}: {len(one.errors)} failed: {one.errors[-1]}"
            console.print(text, markup=False)


def _figure_table(summaries: Sequence[CellSummary]) -> Table:
    table = _table("median, quartiles")
    shown = [name for name in _COLUMNS if any(name in one.figures for one in summaries)]
    for name in ("runs", *(_COLUMNS[name][0] for name in shown)):
        table.add_column(name, justify="right")
    for one in summaries:
        texts = (_spread(one.figures.get(name), *_COLUMNS[name][1:]) for name in shown)
        table.add_row(one.name, str(one.runs), *texts)
    return table


def _spread(value: Spread | None, factor: float, decimals: int) -> str:
    if value is None:
        return "-"
    median, lower, upper = (
        f"{factor * x:.{decimals}f}" for x in (value.median, value.lower, value.upper)
    )
    return f"{median}\n[dim]{lower}..{upper}[/]"


def _ratio_table(summaries: Sequence[CellSummary], baseline: str) -> Table:
    table = _table(f"ratio to {baseline}, 99 %")
    for name in ("pairs", *(_COLUMNS[name][0].removesuffix(" %") for name in COMPARED)):
        table.add_column(name, justify="right")
    table.add_column("tok/s shows")
    for one in summaries:
        speed = one.ratios.get(SPEED)
        if speed is None:
            continue
        pairs, verdict = (speed.pairs, speed.verdict) if isinstance(speed, Ratio) else (0, speed)
        row = (_ratio(one.ratios[name]) for name in COMPARED)
        table.add_row(one.name, str(pairs), *row, verdict)
    return table


def _ratio(value: Ratio | str) -> str:
    if isinstance(value, str):
        return f"[dim]{value}[/]"
    if value.low is None or value.high is None:
        return f"{value.median:.3f}\n[dim]too few pairs[/]"
    return f"{value.median:.3f}\n[dim]{value.low:.3f}..{value.high:.3f}[/]"


def _table(heading: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(heading, style="bold")
    return table
