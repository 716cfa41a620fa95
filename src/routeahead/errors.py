"""What can go wrong. Each message is one line that says what, where and what to do."""

from __future__ import annotations


def visible(text: str) -> str:
    """`text` with what a terminal would obey, and what it cannot show, written as escapes."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


class RouteAheadError(Exception):
    """Base of every error that this package raises on purpose.

    A message may quote a file, so it is made of printable characters alone.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(visible(str(message)))


class ModelError(RouteAheadError, ValueError):
    """The model file cannot be used: missing, malformed, truncated, or nothing to stream in it."""


class SettingsError(RouteAheadError, ValueError):
    """A setting is out of range, or two settings exclude each other."""


class ReadError(RouteAheadError):
    """An expert's bytes could not be read; the token that needed them was discarded."""


class StreamError(RouteAheadError, RuntimeError):
    """The graph or the library did something the engine does not understand."""


class UseError(RouteAheadError, RuntimeError):
    """The model cannot be used now: it is closed, or in use, or belongs to another process."""


class Stopped(RouteAheadError):
    """A batch was ended because nobody wants it any more (`Llama.stopping`)."""


class PolicyError(RouteAheadError, ValueError):
    """A policy asked for what a layer cannot do, such as an expert that it does not have."""


def no_thread(what: str) -> SettingsError:
    """The error to raise where the system refused to start a thread for `what`."""
    return SettingsError(
        f"cannot start a thread for {what}: no more are allowed; "
        "raise the limit (ulimit -u, or pids.max of a container), or give fewer io_threads"
    )
