"""The verbs of the `routeahead` command, and what a signal or an error makes of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import warnings
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from routeahead import SPIN_GIVEN
from routeahead.cli import terminal
from routeahead.cli.collector import no_collection, no_collection_at_exit
from routeahead.errors import RouteAheadError

# Verb → its module here and the function in it.
_VERBS = {
    "run": ("run", "run"),
    "chat": ("chat", "chat"),
    "serve": ("serve", "serve"),
    "inspect": ("inspect", "inspect"),
    "doctor": ("doctor", "doctor"),
    "tune": ("tune", "tune"),
    "bench": ("bench", "bench"),
    "eval": ("eval", "evaluate"),
    "calibrate": ("calibrate", "calibrate"),
    "replay": ("replay", "replay"),
    "io-report": ("io_report", "io_report"),
    "report": ("report_page", "report"),
    "checksum": ("checksum", "checksum"),
    "pack": ("pack", "pack"),
    "pull": ("models", "pull"),
    "list": ("models", "list_models"),
    "rm": ("models", "rm"),
}


class _Verbs(TyperGroup):
    """Imports a verb when it is used: a start is a third shorter without the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _VERBS:
            for verb in _VERBS:  # so that a misspelt one is told what there is
                self._load(verb)
            return None
        return self._load(cmd_name)

    def _load(self, verb: str) -> Any:
        if verb not in self.commands:
            name, function = _VERBS[verb]
            _apply_spin()
            with no_collection():
                from routeahead.cli.configured import ConfiguredCommand

                module = importlib.import_module(f"routeahead.cli.{name}")
            single = typer.Typer(add_completion=False)
            single.command(verb, cls=ConfiguredCommand)(getattr(module, function))
            self.commands[verb] = typer.main.get_command(single)
        return self.commands[verb]


def _apply_spin() -> None:
    """Takes OpenMP's spin count from `config.toml`, unless the environment has one: libgomp reads
    it when it is loaded, hence before a verb is imported."""
    from routeahead.cli.config_file import read_config

    if SPIN_GIVEN:
        return
    with contextlib.suppress(RouteAheadError):  # a verb that reads the file says what is wrong
        spin = read_config().spin
        if spin is not None:
            os.environ["GOMP_SPINCOUNT"] = str(spin)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run Mixture-of-Experts GGUF models larger than memory.",
)


def _version(show: bool) -> None:
    if show:
        from routeahead import __version__

        print(f"routeahead {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    pass


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    _complain("routeahead: warning:", "yellow", message)


def _complain(head: str, style: str, message: object) -> None:
    output = terminal.console(stderr=True)
    output.print(head, style=style, end=" ")
    output.print(terminal.visible(message))


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
    terminal.use_utf8()
    no_collection_at_exit()
    warnings.showwarning = _show_warning
    sys.unraisablehook = _quiet_interrupt
    signals = _Signals()
    status: str | int | None = 0
    try:
        app(prog_name="routeahead")
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except RouteAheadError as error:
        _complain("routeahead:", "red", error)
        status = 1
    except OSError as error:  # a disk that is full, a closed pipe
        _complain("routeahead:", "red", f"{error.filename or 'stdout'}: {error.strerror or error}")
        status = 1
    # An interrupt that passes through `exec` of a text, which makes named tuples when modules are
    # imported, is noted by CPython, which then dies of SIGINT in the end. Another text undoes that.
    exec("")  # nosec B102
    sys.exit(128 + signals.received if signals.received else status)
