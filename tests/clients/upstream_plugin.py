"""Pytest plugin of `upstream.py`: swaps the class, and serves local models to the hub's client."""

from __future__ import annotations

import multiprocessing
import os
import sys
import types
from functools import partial
from typing import Any

import llama_cpp

import routeahead
from routeahead.models import DEFAULT_MODEL


def hf_hub_download(repo_id: str, filename: str) -> str:
    """The embedded model in place of a file on a hub."""
    return str(DEFAULT_MODEL)


def stand_in(name: str, **contents: Any) -> None:
    """A module that is not installed, with the one function that the tests import."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


Llama = routeahead.Llama  # before the stand-ins, because numba looks for scipy
stand_in("huggingface_hub", hf_hub_download=hf_hub_download)
stand_in("scipy")
stand_in("scipy.special", log_softmax=None)  # imported and not used
multiprocessing.cpu_count = lambda: 1  # what the tests give to n_threads

size = os.environ["UPSTREAM_CACHE_MB"]
if size:
    cache = size if size == "auto" else int(size)
    llama_cpp.Llama = partial(Llama, cache_mb=cache, force_cache=cache not in (0, "auto"))
