"""`routeahead report`: recorded runs as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeahead.cli.terminal import note
from routeahead.errors import SettingsError
from routeahead.telemetry.output_files import check_apart, check_writable, replacing


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders with the files of a run each; or the files, of which one of a kind that "
            "the run has already begins the next run.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    token: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Position of the token whose reads are shown, as in the trace's column `step`.",
            show_default="one that read as much as the median",
        ),
    ] = None,
) -> None:
    """Show recorded runs side by side: one HTML page, which asks for nothing else.

    It takes what `run` wrote with --report, --csv, --io-trace and --route-trace, any of them.

    \b
    routeahead run -p "Hello" --report run.json --io-trace reads.csv --route-trace routes.csv
    routeahead report run.json reads.csv routes.csv
    routeahead report monday/ tuesday/ -o both.html
    """
    try:
        from routeahead.report.page import render
        from routeahead.report.runs import read_runs
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("routeahead"):
            raise
        raise SettingsError(f"report needs the package {error.name}") from None
    missing = next((path for path in runs if not path.exists()), None)
    if missing:
        raise SettingsError(f"{missing}: there is no such file or folder")
    found = read_runs(runs)
    check_apart([("a file of a run", p) for run in found for p in run.files.values()], [output])
    check_writable(output)
    page = render(found, token)
    with replacing(output) as file:
        file.write(page)
    note(f"wrote {output}")
