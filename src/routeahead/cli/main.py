"""The `routeahead` command: collects the verbs and turns errors into one line."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from routeahead.cli import terminal
from routeahead.cli.collector import no_collection, no_collection_at_exit
from routeahead.errors import RouteAheadError

# Verb → its module here and the function in it.
_VERBS = {
    "run": ("run", "run"),
    "inspect": ("inspect", "inspect"),
    "bench": ("bench", "bench"),
    "eval": ("eval", "evaluate"),
    "replay": ("replay", "replay"),
    "io-report": ("io_report", "io_report"),
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
            with no_collection():
                module = importlib.import_module(f"routeahead.cli.{name}")
            single = typer.Typer(add_completion=False)
            single.command(verb)(getattr(module, function))
            self.commands[verb] = typer.main.get_command(single)
        return self.commands[verb]


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


def main() -> None:
    """Entry point. Exit status 1 for what the user can mend, 2 for a wrong command line."""
    terminal.use_utf8()
    no_collection_at_exit()
    warnings.showwarning = _show_warning
    sys.unraisablehook = _quiet_interrupt
    try:
        app(prog_name="routeahead")
    except RouteAheadError as error:
        _complain("routeahead:", "red", error)
        sys.exit(1)
    except OSError as error:  # a disk that is full, a closed pipe
        reason = error.strerror or error
        _complain("routeahead:", "red", f"{error.filename or 'stdout'}: {reason}")
        sys.exit(1)


if __name__ == "__main__":
    main()
