"""`routeahead io-report`: what a run read, from its I/O trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from routeahead.cli.terminal import Column, print_table
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
    """Report bytes a token, re-reads, and slices that were read early and again on demand.

    \b
    routeahead run model.gguf -p "Hello" --io-trace reads.csv
    routeahead io-report reads.csv
    """
    reports = {str(path): report(read_io_trace(path), tokens=tokens) for path in traces}
    if as_json:
        rows = {
            name: {**asdict(one), "bytes_per_token": one.bytes_per_token}
            for name, one in reports.items()
        }
        print(json.dumps(rows, indent=2))
        return
    found = list(reports.values())
    columns = {
        "reads": [str(one.reads) for one in found],
        "MiB": [f"{one.bytes_read / MIB:.1f}" for one in found],
        "decoded": [str(one.decode_tokens) for one in found],
        "MiB a token": [f"{one.bytes_per_token / MIB:.2f}" for one in found],
        "read before": [f"{one.redundancy:.1%}" for one in found],
        "early + again": [str(one.early_again) for one in found],
        "median ms": [f"{1e3 * one.latency_s:.2f}" for one in found],
        "kinds": [_counted(one.kinds) for one in found],
    }
    print_table("trace", list(reports), [Column(*column) for column in columns.items()])


def _counted(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
