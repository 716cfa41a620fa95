"""What can go wrong. Each message is one line that says what, where and what to do."""

from __future__ import annotations


class RouteAheadError(Exception):
    """Base of every error that this package raises on purpose."""


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


class PolicyError(RouteAheadError, ValueError):
    """A policy asked for what a layer cannot do, such as an expert that it does not have."""
