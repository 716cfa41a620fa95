"""Settings written as the streaming flags of `routeahead run`."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

import typer

from routeahead.cli import options
from routeahead.config import Settings
from routeahead.errors import RouteAheadError, SettingsError

# click's class; newer Typers bring their own click, under a private name.
_UsageError: Any = typer.BadParameter.__base__


def llama_kwargs(flags: str) -> dict[str, Any]:
    """Keyword arguments for `routeahead.Llama` from e.g. `--cache-mb 300 --no-overlap`.

    Every field of `routeahead.Settings` has a flag here; other options of `run` are refused.

    Raises:
        SettingsError: a flag is unknown, not about streaming, or has a value that makes no sense.
    """
    try:
        values = _streaming_command().make_context("", shlex.split(flags)).params
        kwargs = options.as_settings(values)
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
    """A command whose options are the settings."""
    app = typer.Typer(add_completion=False)

    @app.command(add_help_option=False)
    @options.with_settings
    def streaming(**settings: Any) -> None:
        pass

    return typer.main.get_command(app)
