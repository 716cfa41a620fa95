"""The verbs of the `routeahead` command, and what a signal or an error makes of them."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Any, NoReturn

import typer
from rich.console import Console

from routeahead import __version__
from routeahead.cli import bench, eval, inspect, io_report, replay, run
from routeahead.errors import RouteAheadError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run Mixture-of-Experts GGUF models larger than memory.",
)
app.command()(run.run)
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


class _Signals:
    """Makes a request to end (SIGTERM, SIGHUP) what Ctrl-C is: what is open is completed.

    A signal that somebody chose to ignore stays ignored.

    Attributes:
        received: the number of the signal that asked; 0 if none did.
    """

    def __init__(self) -> None:
        self.received = 0
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, _frame: Any) -> None:
        self.received = number
        raise KeyboardInterrupt


def run_command() -> NoReturn:
    """Runs the command line of this process and exits.

    Exit status 1 for what the user can mend, 2 for a wrong command line, 128 and its number after a
    signal.
    """
    warnings.showwarning = _show_warning
    sys.unraisablehook = _quiet_interrupt
    signals = _Signals()
    status: str | int | None = 0
    try:
        app()
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (RouteAheadError, OSError) as error:  # an OSError: a disk that is full, a closed pipe
        _errors.print("[red]routeahead:[/]", end=" ")
        _errors.print(str(error), markup=False)
        status = 1
    sys.exit(128 + signals.received if signals.received else status)
