"""Runs Mixture-of-Experts models larger than memory: experts are read as tokens route to them.

`routeahead.Llama` is a `llama_cpp.Llama` that streams.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from routeahead.config import Settings
from routeahead.errors import (
    ModelError,
    PolicyError,
    ReadError,
    RouteAheadError,
    SettingsError,
    StreamError,
)
from routeahead.routing.policy import Model, Policy, Routing

if TYPE_CHECKING:
    from routeahead.engine.llama import Llama
    from routeahead.telemetry.frame import read_trace

    __version__: str

__all__ = [
    "Llama",
    "Model",
    "ModelError",
    "Policy",
    "PolicyError",
    "ReadError",
    "RouteAheadError",
    "Routing",
    "Settings",
    "SettingsError",
    "StreamError",
    "read_trace",
]

# OpenMP's idle threads spin, and starve the lanes where cores are few. libgomp reads this when it
# is loaded, hence before llama_cpp is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Imports what takes long only when it is needed: replaying a trace needs no llama.cpp."""
    if name == "Llama":
        from routeahead.engine.llama import Llama

        return Llama
    if name == "read_trace":
        from routeahead.telemetry.frame import read_trace

        return read_trace
    if name == "__version__":
        from importlib.metadata import version

        return version("routeahead")
    raise AttributeError(f"module 'routeahead' has no attribute {name!r}")
