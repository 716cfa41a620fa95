"""`routeahead bench`: compares ways to run a model, in turn and by fresh processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.bench.cells import CellList, parse_cell, read_cells
from routeahead.bench.runs import Bench, Plan, Run
from routeahead.bench.statistics import LEAST_PAIRS, Ratio, Spread
from routeahead.bench.summary import COMPARED, SPEED, CellSummary, figures, summarise
from routeahead.cli import against_doctor, options
from routeahead.cli.terminal import Column, print_table, visible
from routeahead.cluster import Cluster
from routeahead.doctor.examination import Examination
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB, shard_paths
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.output_files import check_apart, check_writable

# figure → (heading, factor, decimals)
_COLUMNS = {
    SPEED: ("tok/s", 1, 2),
    "ms": ("ms/token", 1, 1),
    "compute_ms": ("compute ms", 1, 1),
    "stall_ms": ("stall ms", 1, 1),
    "adopt_ms": ("adoption ms", 1, 1),
    "mgmt_ms": ("management ms", 1, 2),
    "reads": ("reads/token", 1, 1),
    "mib_per_token": ("MiB/token", 1, 1),
    "mib_per_s": ("MiB/s", 1, 0),
    "hit_rate": ("hits %", 100, 1),
    "miss_rate": ("misses %", 100, 1),
}


def bench(
    model: options.Model = None,
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
            parser=options.size_option,
            metavar="SIZE",
            help="Memory a run may use, page cache included (Linux cgroup): MiB, or as 4G.",
        ),
    ] = None,
    against: Annotated[
        bool,
        typer.Option(
            "--against-doctor",
            help="Ask `doctor` first, and say whether the runs lay in its band. Its routing is "
            "recorded text: give cells --replay-routing to feed it.",
        ),
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write everything, raw, to this file.")
    ] = None,
    ray: options.Ray = None,
) -> None:
    """Compare ways to run a model: every cell in every pass, in changing order, on the same tokens.

    Each run is a fresh process that starts without the model in the page cache.

    Exit status 1 if a run failed, 130 if interrupted; what was measured is shown all the same.

    \b
    routeahead bench model.gguf --cell "a:--cache-mb 0" --cell "b:--cache-mb 2G"
    routeahead bench model.gguf --cells cells.txt --passes 10 --json bench.json
    """
    path = options.model_path(model)
    if as_json:
        shards = [("a file of the model", shard) for shard in shard_paths(path)]
        check_apart([*shards, *([("the list of cells", cells)] if cells else [])], [as_json])
        check_writable(as_json)
    plan = Plan(
        passes=passes,
        tokens=tokens,
        warmup=warmup,
        threads=threads or default_threads(),  # the same for all runs
        seed=seed,
        memory_limit=memory_limit * MIB if memory_limit else None,
    )
    benchmark = Bench(read_layout(path), _cells(cell, cells), plan, baseline)
    options.announce(model)
    if against and ray:
        raise SettingsError("--against-doctor forecasts this machine, and --ray uses others")
    if against and memory_limit:
        raise SettingsError("--against-doctor knows of no --memory-limit: leave one of them out")
    told = against_doctor.forecasts(benchmark) if against else {}
    more = {"doctor": _as_json(told)} if told else {}
    with Cluster(ray) if ray else nullcontext() as cluster:
        interrupted = _run(benchmark, as_json, more, cluster)
    _show(benchmark, _summaries(benchmark))
    if told:
        against_doctor.show(told, _summaries(benchmark))
    if interrupted:
        raise typer.Exit(130)
    if any(run.error for run in benchmark.runs):
        raise typer.Exit(1)


def _cells(given: list[str] | None, file: Path | None) -> CellList:
    if given and file:
        raise SettingsError("give --cell or --cells, not both")
    return read_cells(file) if file else CellList("", [parse_cell(text) for text in given or []])


def _as_json(told: dict[str, Examination]) -> dict[str, Any]:
    return {cell: found.as_dict() for cell, found in told.items()}


def _run(
    benchmark: Bench, as_json: Path | None, more: dict[str, Any], cluster: Cluster | None
) -> bool:
    """Runs everything, with a line on stderr for each run; True if interrupted.

    `more` is written beside the runs.
    """
    try:
        for run in benchmark.spread(cluster) if cluster else benchmark:
            _write(benchmark, as_json, more)  # each time: hours of runs survive whatever happens
            place = f"[{len(benchmark.runs)}/{len(benchmark)}] pass {run.pass_index + 1}"
            outcome = _outcome(run, benchmark.plan.warmup)
            line = visible(f"{place}, {run.cell}: {outcome}")
            print(line, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        _write(benchmark, as_json, more)
        return True
    return False


def _write(benchmark: Bench, path: Path | None, more: dict[str, Any]) -> None:
    if path:
        summary = [one.as_dict() for one in _summaries(benchmark)]
        write_json(path, benchmark.as_dict() | {"summary": summary} | more)


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
    if benchmark.cells.question:
        print(visible(benchmark.cells.question))
    names = [one.name for one in summaries]
    print_table("median, quartiles", names, _figure_columns(summaries))
    compared = [one for one in summaries if SPEED in one.ratios]
    if compared:
        heading = f"ratio to {benchmark.baseline}, 99 %"
        print_table(heading, [one.name for one in compared], _ratio_columns(compared))
    for one in summaries:
        if one.errors:
            print(visible(f"{one.name}: {len(one.errors)} failed: {one.errors[-1]}"))


def _figure_columns(summaries: Sequence[CellSummary]) -> list[Column]:
    columns = [Column("runs", [str(one.runs) for one in summaries])]
    for name, (heading, factor, decimals) in _COLUMNS.items():
        spreads = [one.figures.get(name) for one in summaries]
        if any(spreads):
            columns.append(Column(heading, [_spread(one, factor, decimals) for one in spreads]))
    return columns


def _spread(value: Spread | None, factor: float, decimals: int) -> str:
    if value is None:
        return "-"
    median, lower, upper = (
        f"{factor * x:.{decimals}f}" for x in (value.median, value.lower, value.upper)
    )
    return f"{median}\n{lower}..{upper}"


def _ratio_columns(summaries: Sequence[CellSummary]) -> list[Column]:
    """The ratios of each figure, and beside that of the speed what it shows."""
    speeds = [one.ratios[SPEED] for one in summaries]
    columns = [
        Column(heading.removesuffix(" %"), [_ratio(one.ratios[name]) for one in summaries])
        for name, (heading, _, _) in _COLUMNS.items()
        if name in COMPARED
    ]
    verdicts = [one.verdict if isinstance(one, Ratio) else one for one in speeds]
    pairs = [str(one.pairs) if isinstance(one, Ratio) else "0" for one in speeds]
    shown = Column("it shows", verdicts, left=True)
    return [Column("pairs", pairs), columns[0], shown, *columns[1:]]


def _ratio(value: Ratio | str) -> str:
    if isinstance(value, str):
        return value
    if value.low is None or value.high is None:
        return f"{value.median:.3f}"
    return f"{value.median:.3f}\n{value.low:.3f}..{value.high:.3f}"
