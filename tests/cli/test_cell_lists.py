"""Cells of a benchmark against the program and a model: their flags, and shares of the experts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer
from support.library import Library

from routeahead import Settings
from routeahead.bench.cells import (
    check_cells,
    expand_shares,
    read_cells,
)
from routeahead.cli import options
from routeahead.cli.run import run
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def model(library: Library) -> Path:
    return library.path("qwen3moe", 4)


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "cells").iterdir()), ids=lambda p: p.name)
def test_lists_in_the_repository_are_what_the_program_takes(path: Path, model: Path) -> None:
    found = read_cells(path)
    check_cells(found.cells, None)
    layout, app = read_layout(model), typer.Typer()
    app.command()(run)
    command = typer.main.get_command(app)
    settings = {field.name for field in fields(Settings)}
    for cell in found.cells:
        flags = expand_shares(cell.flags, layout)
        script = Path(cell.program[1])
        if cell.program[-1] == "run":
            given = command.make_context("run", [str(model), *flags]).params
            streaming = {name: value for name, value in given.items() if name in settings}
            Settings.split(options.as_settings(streaming))
        else:
            assert (BENCHMARKS.parent / script).is_file()


def test_shares_of_the_experts(model: Path) -> None:
    layout = read_layout(model)
    whole = -(-layout.expert_bytes // MIB)
    assert expand_shares(["--cache-mb", "{100%}"], layout) == ["--cache-mb", str(whole)]
    quarter = int(expand_shares(["{25%}"], layout)[0])
    assert (quarter - 1) * 4 * MIB < layout.expert_bytes <= quarter * 4 * MIB
