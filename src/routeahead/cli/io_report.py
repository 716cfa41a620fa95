"""`routeahead io-report`: what a run read, from its I/O trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from routeahead.experts.layout import MIB
from routeahead.telemetry.io_trace import read_io_trace, report


def io_report(
    traces: Annotated[
        list[Path], typer.Argument(help="Files of `run --io-trace`.", show_default=False)
    ],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Count this many decoded tokens, for runs of unequal length."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Report bytes a token, re-reads, and slices that were read early and again on demand."""
    reports = {str(path): report(read_io_trace(path), tokens=tokens) for path in traces}
    if as_json:
        rows = {
            name: {**asdict(one), "bytes_per_token": one.bytes_per_token}
            for name, one in reports.items()
        }
        print(json.dumps(rows, indent=2))
        return
    headings = ["trace", "reads", "MiB", "decoded", "MiB a token", "read before", "early + again"]
    table = Table(*headings, "kinds", "median ms")
    for name, one in reports.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(one.kinds.items()))
        table.add_row(
            name,
            str(one.reads),
            f"{one.bytes_read / MIB:.1f}",
            str(one.decode_tokens),
            f"{one.bytes_per_token / MIB:.2f}",
            f"{one.redundancy:.1%}",
            str(one.early_again),
            kinds,
            f"{1e3 * one.latency_s:.2f}",
        )
    Console().print(table)
