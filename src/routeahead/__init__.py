"""Runs Mixture-of-Experts models larger than memory: experts are read as tokens route to them.

`routeahead.Llama` is a `llama_cpp.Llama` that streams.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from routeahead.config import Settings
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

if TYPE_CHECKING:
    from routeahead.engine.llama import Llama

__version__ = version("routeahead")
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
]

# OpenMP's idle threads spin, and starve the lanes where cores are few. libgomp reads this when it
# is loaded, hence before llama_cpp is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Imports llama.cpp only when it is needed: replaying a trace does not."""
    if name == "Llama":
        from routeahead.engine.llama import Llama

        return Llama
    raise AttributeError(f"module 'routeahead' has no attribute {name!r}")
