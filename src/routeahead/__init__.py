"""Runs Mixture-of-Experts models larger than memory: experts are read as tokens route to them.

`routeahead.Llama` is a `llama_cpp.Llama` that streams.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeahead.config import Settings
    from routeahead.engine.llama import Llama
    from routeahead.errors import (
        ModelError,
        PolicyError,
        ReadError,
        RouteAheadError,
        SettingsError,
        StreamError,
        UseError,
    )
    from routeahead.routing.policy import Model, Policy, Routing
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
    "UseError",
    "read_trace",
]

_HOMES = {
    "Llama": "engine.llama",
    "Settings": "config",
    "Model": "routing.policy",
    "Policy": "routing.policy",
    "Routing": "routing.policy",
    "read_trace": "telemetry.frame",
}

if not hasattr(os, "preadv"):
    raise ImportError(
        "routeahead needs Linux, or macOS (untested): this system has no preadv; on Windows, use "
        "WSL 2"
    )

# OpenMP's idle threads spin, and starve the lanes where cores are few. libgomp reads this when it
# is loaded, hence before llama_cpp is imported.
SPIN_GIVEN = "GOMP_SPINCOUNT" in os.environ
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Imports a module when one of its names is used: replaying a trace needs no llama.cpp, and the
    command needs nothing before it is ready for Ctrl-C."""
    if name == "__version__":
        from importlib.metadata import version

        return version("routeahead")
    if name not in __all__:
        raise AttributeError(f"module 'routeahead' has no attribute {name!r}")
    home = importlib.import_module(f"routeahead.{_HOMES.get(name, 'errors')}")
    return getattr(home, name)
