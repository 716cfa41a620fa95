"""Cells of a benchmark: their grammar, their lists and their order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from routeahead.bench.cells import (
    check_cells,
    parse_cell,
    read_cells,
    run_order,
)
from routeahead.errors import SettingsError


def test_cell_grammar() -> None:
    cell = parse_cell("small: SHADE=a=b X= --cache-mb 5 -p 'two words: here' --no-overlap")
    assert (cell.name, cell.environment) == ("small", {"SHADE": "a=b", "X": ""})
    assert cell.flags == ("--cache-mb", "5", "-p", "two words: here", "--no-overlap")
    assert cell.program[-1] == "run"
    other = parse_cell("other:tools/run.py fast -t 1 A=1")
    assert other.program == (sys.executable, "tools/run.py", "fast")
    assert other.flags == ("-t", "1", "A=1")
    native = parse_cell("native: ./llama --x")
    assert native.program == ("./llama",)
    assert parse_cell("plain:").flags == ()


@pytest.mark.parametrize("text", ["", "no colon", ": --flags", "two words: --flags", "x: 'open"])
def test_cells_that_make_no_sense(text: str) -> None:
    with pytest.raises(SettingsError, match="cell"):
        parse_cell(text)


def test_list_of_cells(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    path.write_text("# What does\n# it cost?\n\na: --x 1\n# half\nb: --y\n")
    found = read_cells(path)
    assert found.question == "What does it cost?"
    assert [(cell.name, cell.flags) for cell in found.cells] == [
        ("a", ("--x", "1")),
        ("b", ("--y",)),
    ]
    path.write_text("a: --x 1\n# asked too late\n")
    with pytest.raises(SettingsError, match="question"):
        read_cells(path)
    with pytest.raises(SettingsError, match="cannot read"):
        read_cells(tmp_path / "absent")


def test_cells_are_told_apart() -> None:
    cells = [parse_cell("a:"), parse_cell("b:")]
    assert check_cells(cells, None) == "a"
    assert check_cells(cells, "b") == "b"
    for wrong, baseline in (([], None), ([*cells, cells[0]], None), (cells, "c")):
        with pytest.raises(SettingsError):
            check_cells(wrong, baseline)


def test_order_is_random_and_then_reversed() -> None:
    order = run_order(5, 6, seed=3)
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in order)
    assert all(order[index + 1] == order[index][::-1] for index in (0, 2, 4))
    assert order == run_order(5, 6, seed=3) != run_order(5, 6, seed=4)
    assert order[0] != order[2]
