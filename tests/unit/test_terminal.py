"""What is printed: tables that fit, names that stay text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from routeahead.cli.terminal import Column, size, tables, visible, without_controls
from routeahead.experts.layout import MIB


def rendered(width: int, columns: list[Column], names: list[str]) -> list[str]:
    out = io.StringIO()
    for table in tables("cell", names, columns, width):
        Console(file=out, width=width, markup=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_columns_that_do_not_fit_follow_below() -> None:
    columns = [Column(f"figure {n}", [f"{n}.50\n{n}.25..{n}.75", "-"]) for n in range(9)]
    narrow, wide = rendered(80, columns, ["a", "b"]), rendered(300, columns, ["a", "b"])
    assert max(map(len, narrow)) <= 80 and len(wide) == 4 < len(narrow)
    text = "\n".join(narrow)
    for n in range(9):  # nothing is cut
        assert f"figure {n}" in text and f"{n}.50" in text and f"{n}.25..{n}.75" in text
    assert sum(line.startswith("a ") for line in narrow) == sum("cell" in line for line in narrow)


def test_a_name_is_no_markup_and_no_escape_sequence() -> None:
    lines = rendered(80, [Column("n", ["[red]1[/]"])], ["[bold]\x1b]0;title\x07cell"])
    assert "[bold]\\x1b]0;title\\x07cell" in lines[1] and "[red]1[/]" in lines[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("zéro → 0", "zéro → 0"),
        ("a\x1b[2Jb\x07", "a\\x1b[2Jb\\x07"),
        ("two\nlines", "two\\nlines"),
        ("\u202eleft", "\\u202eleft"),
        ("\udcff", "\\udcff"),
        ("\x9b31m", "\\x9b31m"),
    ],
)
def test_what_is_not_printable_is_spelt_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_what_a_model_writes_keeps_all_but_controls() -> None:
    assert without_controls("a\n\tb\r\x1b[2J\x9b") == "a\n\tb\\x0d\\x1b[2J\\x9b"
    spaced = "n\u00b0\u202f1 \U0001f469\u200d\U0001f52c\u00a0!"
    assert without_controls(spaced) == spaced


def test_small_sizes_are_no_zero() -> None:
    assert [size(n) for n in (0, 512, 20736, 4 * MIB, 5000 * MIB)] == [
        "0.0 MiB",
        "0.5 KiB",
        "20.2 KiB",
        "4.0 MiB",
        "5,000.0 MiB",
    ]
