"""What the verbs print: text that is safe to show, tables that fit the terminal, progress."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from routeahead.experts.layout import MIB

# A table is never squeezed into less if its lines go to a file.
_FILE_WIDTH = 160
_GAP = 2  # blanks between two columns


def visible(text: object) -> str:
    """`text` in one line, with what is not printable spelt out, such as `\\x1b`.

    For whatever comes from a file or from the command line: an escape sequence would otherwise
    reach the terminal.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown
    )


_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def without_controls(text: str) -> str:
    """`text` with control characters spelt out, but for line breaks and tabs: what a model writes
    may have several lines and any other character."""
    return text.translate(_CONTROLS)


def use_utf8() -> None:
    """Makes stdout and stderr UTF-8 whatever the locale says; what cannot be encoded is spelt out.

    Prompts and outputs are files as well, and a file of a Latin-1 locale would be read as UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def console(*, stderr: bool = False) -> Console:
    """A console that takes no markup, so that a name in brackets stays what it is."""
    made = Console(stderr=stderr, soft_wrap=True, markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made.width = _FILE_WIDTH
    return made


def note(text: str) -> None:
    """A line on stderr about what the command is about to do or has done."""
    print(f"routeahead: {visible(text)}", file=sys.stderr, flush=True)


def size(nbytes: float) -> str:
    """Bytes as MiB, or as KiB where that would round to little."""
    if 0 < nbytes < MIB:
        return f"{nbytes / 1024:,.1f} KiB"
    return f"{nbytes / MIB:,.1f} MiB"


def print_lines(lines: Sequence[str], *, stderr: bool = False) -> None:
    """Prints `label: text` lines, broken between words if they go to a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    columns = shutil.get_terminal_size().columns if stream.isatty() else None
    for line in map(visible, lines):
        print("\n".join(_wrapped(line, columns)), file=stream)


def _wrapped(line: str, columns: int | None) -> list[str]:
    indent = len(line) - len(line.lstrip()) + 2
    if columns is None or len(line) <= columns:
        return [line]
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip


def print_facts(rows: Sequence[tuple[str, str]]) -> None:
    """Prints labels and values in two columns; a value's further lines stand below its first.

    A word is never cut: a path can be copied.
    """
    width = max(len(label) for label, _ in rows) + _GAP
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _FILE_WIDTH
    for label, value in rows:
        lines = textwrap.wrap(
            visible(value), max(columns - width, 20), break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        for first, line in zip([label, *[""] * len(lines)], lines or [""], strict=False):
            print(f"{first:<{width}}{line}")


@dataclass(frozen=True)
class Column:
    """A column of numbers: its heading, and a text for each line of the table.

    A text may have a second line, which is shown dim.
    """

    heading: str
    texts: Sequence[str]
    left: bool = False

    @property
    def width(self) -> int:
        return max(len(part) for text in (self.heading, *self.texts) for part in text.split("\n"))


def print_table(heading: str, names: Sequence[str], columns: Sequence[Column]) -> None:
    """Prints a table whose lines are named; columns that do not fit follow in a second table."""
    output = console()
    for index, table in enumerate(tables(heading, names, columns, output.width)):
        if index:
            output.print()
        output.print(table)


def tables(
    heading: str, names: Sequence[str], columns: Sequence[Column], width: int
) -> Iterator[Table]:
    """The tables of `print_table`, each at most `width` wide if its first two columns are not."""
    first = Column(heading, [visible(name) for name in names])
    left = list(columns)
    while left:
        room, shown = width - first.width, list[Column]()
        while left and (not shown or left[0].width + _GAP <= room):
            shown.append(left.pop(0))
            room -= shown[-1].width + _GAP
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column(first.heading, style="bold", no_wrap=True)
        for column in shown:
            table.add_column(
                column.heading, justify="left" if column.left else "right", no_wrap=True
            )
        for index, name in enumerate(first.texts):
            table.add_row(name, *(_cell(column.texts[index]) for column in shown))
        yield table


def _cell(text: str) -> Text:
    """A table's cell; its second line, if there is one, is dim."""
    upper, _, lower = text.partition("\n")
    shown = Text(visible(upper))
    return shown.append(f"\n{visible(lower)}", "dim") if lower else shown


class _Live:
    """A text that is asked for anew at each refresh."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __rich__(self) -> Text:
        return Text(visible(self._text()))


@contextmanager
def progress() -> Iterator[Callable[[Callable[[], str]], None]]:
    """Shows in words what goes on; what it gives takes the next text, as a function that makes it.

    The function is called ten times a second, on a thread of its own. Shows nothing if stderr is
    no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with console(stderr=True).status("") as status:
        yield lambda text: status.update(_Live(text))


@contextmanager
def bars(where: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars in the `with` block, one for each name: the function takes a name, what is done
    and the total. They are gone at its end."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=where, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(visible(name), total=total)
            progress.update(tasks[name], completed=done)

        yield show
