"""Settings written as the streaming flags of `routeahead run`, read by its own definitions."""

from __future__ import annotations

import shlex
from dataclasses import fields
from functools import cache
from typing import Any

import typer

from routeahead.cli import options
from routeahead.cli.run import run
from routeahead.config import Settings
from routeahead.errors import RouteAheadError, SettingsError

# click's class; newer Typers bring their own click, under a private name.
_UsageError: Any = typer.BadParameter.__base__


def llama_kwargs(flags: str) -> dict[str, Any]:
    """Keyword arguments for `routeahead.Llama` from e.g. `--cache-mb 300 --no-overlap`.

    Every option of `run` that is a field of `routeahead.Settings` is known here; its other options
    and its arguments are refused.

    Raises:
        SettingsError: a flag is unknown, not about streaming, or has a value that makes no sense.
    """
    try:
        values = _streaming_command().make_context("", shlex.split(flags)).params
        kwargs = options.streaming(**values)
        Settings.split(kwargs)
    except _UsageError as error:
        reason = error.format_message().rstrip(".")
        raise SettingsError(
            f"{flags!r}: {reason}: give streaming flags of `routeahead run`"
        ) from None
    except (RouteAheadError, ValueError) as error:  # a ValueError is shlex's, of quotes
        raise SettingsError(f"{flags!r}: {error}") from None
    return kwargs


@cache
def _streaming_command() -> Any:
    """The command `run`, less every option that is no setting."""
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(run)
    command = typer.main.get_command(app)
    names = {field.name for field in fields(Settings)}
    command.params = [option for option in command.params if option.name in names]
    return command
