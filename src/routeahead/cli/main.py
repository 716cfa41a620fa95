"""The `routeahead` command: collects the verbs and turns errors into one line."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import typer
from rich.console import Console

from routeahead import __version__
from routeahead.cli import bench, chat, eval, inspect, io_report, replay, run, serve
from routeahead.errors import RouteAheadError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run Mixture-of-Experts GGUF models larger than memory.",
)
app.command()(run.run)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(inspect.inspect)
app.command()(bench.bench)
app.command("eval")(eval.evaluate)
app.command()(replay.replay)
app.command()(io_report.io_report)

_errors = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def _version(show: bool) -> None:
    if show:
        print(f"routeahead {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    pass


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    _errors.print(f"[yellow]routeahead: warning:[/] {message}")


def _quiet_interrupt(dropped: Any) -> None:
    """A Ctrl-C that hits a callback's first line is dropped by ctypes; the engine notices it."""
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)


def main() -> None:
    """Entry point. Exit status 1 for what the user can mend, 2 for a wrong command line."""
    warnings.showwarning = _show_warning
    sys.unraisablehook = _quiet_interrupt
    try:
        app()
    except (RouteAheadError, OSError) as error:  # an OSError: a disk that is full, a closed pipe
        _errors.print("[red]routeahead:[/]", end=" ")
        _errors.print(str(error), markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
