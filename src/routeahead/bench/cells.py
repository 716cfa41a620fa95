"""Cells of a benchmark: what is run, and in which order."""

from __future__ import annotations

import random
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB, ModelLayout

_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SHARE = re.compile(r"\{(\d+)%\}")
_RUN = (sys.executable, "-m", "routeahead.cli.main", "run")


@dataclass(frozen=True)
class Cell:
    """One way to run the model.

    Attributes:
        name: what tables call it.
        environment: variables set for its processes.
        program: command that takes the model and the flags.
        flags: its arguments, beside those that every cell gets.
    """

    name: str
    environment: dict[str, str]
    program: tuple[str, ...]
    flags: tuple[str, ...]


def is_run(cell: Cell) -> bool:
    """Whether a cell is `routeahead run`, as this process would be."""
    return cell.program == _RUN and not cell.environment


@dataclass(frozen=True)
class CellList:
    """The cells that answer a question, which is empty for cells from the command line."""

    question: str
    cells: Sequence[Cell]


def parse_cell(text: str) -> Cell:
    """Reads `name: [VARIABLE=value ...] [program ...] [--flag ...]`, quoted as in a shell.

    Without a program the cell is `routeahead run`. A program whose name ends in .py is run by this
    Python. Paths are relative to the current folder, as in a shell.

    Raises:
        SettingsError: no name, or quotes that do not match.
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not name or len(name.split()) > 1:
        raise SettingsError(
            f"cell {text!r}: write it as name:flags, for example 'none:--cache-mb 0'"
        )
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise SettingsError(f"cell {name!r}: {error}") from None
    settings = list(takewhile(_ASSIGNMENT.match, words))
    words = words[len(settings) :]
    program = list(takewhile(lambda word: not word.startswith("-"), words))
    flags = words[len(program) :]
    if program and program[0].endswith(".py"):
        program = [sys.executable, *program]
    environment = dict(setting.split("=", 1) for setting in settings)
    return Cell(name, environment, tuple(program) or _RUN, tuple(flags))


def read_cells(path: Path) -> CellList:
    """Reads a list of cells, a line each, under a comment that states the question.

    Raises:
        SettingsError: the file cannot be read or states no question.
    """
    question, lines = read_list(path)
    return CellList(question, [parse_cell(line) for line in lines])


def read_list(path: Path) -> tuple[str, list[str]]:
    """The question that a list answers, from the # lines on top, and its entries, one a line.

    Raises:
        SettingsError: the file cannot be read or states no question.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot read the list: {error}") from None
    comments = takewhile(lambda line: line.startswith("#"), lines)
    question = " ".join(line.lstrip("# ") for line in comments).strip()
    if not question:
        raise SettingsError(f"{path}: state the question that the list answers in a # line on top")
    return question, [line for line in lines if line and line[0] != "#"]


def check_cells(cells: Sequence[Cell], baseline: str | None) -> str:
    """The baseline's name: the first cell's if none is given.

    Raises:
        SettingsError: no cells, a name given twice, or no cell of the baseline's name.
    """
    names = [cell.name for cell in cells]
    if not names:
        raise SettingsError("nothing to run: give cells with --cell or --cells")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise SettingsError(f"two cells are named {twice!r}: give each a name of its own")
    if baseline and baseline not in names:
        raise SettingsError(f"no cell is named {baseline!r}: the cells are {', '.join(names)}")
    return baseline or names[0]


def expand_shares(flags: Sequence[str], layout: ModelLayout) -> list[str]:
    """Replaces {25%} by a quarter of the model's expert weights in MiB, rounded up.

    With it, a list of cells fits every model.
    """

    def mib(match: re.Match[str]) -> str:
        return str(-(-layout.expert_bytes * int(match[1]) // (100 * MIB)))

    return [_SHARE.sub(mib, flag) for flag in flags]


def run_order(cells: int, passes: int, seed: int) -> list[list[int]]:
    """The order of the cells in each pass: random, and reversed in every second pass.

    So no cell gains from its place while the machine heats up or a cache fills.
    """
    rng, order = random.Random(seed), list[list[int]]()
    for index in range(passes):
        order.append(order[-1][::-1] if index % 2 else rng.sample(range(cells), cells))
    return order
