"""What the constructor of `Llama` takes: settings, and what `llama_cpp.Llama` takes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import llama_cpp

from routeahead.config import Settings
from routeahead.setting import STREAMING, facts_of, types_of

_ORIGINAL = inspect.signature(llama_cpp.Llama.__init__).parameters

# What is a setting of ours, too, is one.
LLAMA_ARGUMENTS = frozenset(_ORIGINAL) - {"self", "kwargs"} - facts_of(Settings).keys()

# What llama-cpp-python took once and now ignores, but its own server and LangChain still pass.
_OBSOLETE = frozenset({"f16_kv", "mul_mat_q", "n_parts", "rpc_servers"})

# Set by examples and by llama_cpp.server, to be fast.
_NO_DEVICE = "n_gpu_layers (this llama.cpp was built without a GPU)"
_NO_LOCK = "use_mlock (experts come and go)"

_SET_MOST = ("cache_mb", "n_ctx", "n_threads", "io_threads")


def split(arguments: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Separates keyword arguments into settings and what `llama_cpp.Llama` is given.

    Raises:
        TypeError: a keyword is neither.
        SettingsError: settings contradict each other.
    """
    known = {name: value for name, value in arguments.items() if name not in _OBSOLETE}
    settings, llama = Settings.split(known, LLAMA_ARGUMENTS)
    ignored = []
    if settings.n_gpu_layers and not llama_cpp.llama_supports_gpu_offload():
        settings = replace(settings, n_gpu_layers=0)
        ignored.append(_NO_DEVICE)
    if llama.pop("use_mlock", None):
        ignored.append(_NO_LOCK)
    if ignored:
        warnings.warn(f"ignored: {', '.join(ignored)}", stacklevel=3)
    return settings, llama


def signature(constructor: Any, own: Iterable[str]) -> inspect.Signature:
    """All keywords of a constructor by name, as `help` and editors show them.

    Begins with what is set most, then come streaming settings, other settings, the constructor's
    `own` keywords, and llama.cpp's.
    """
    mine = inspect.signature(constructor).parameters
    kinds, facts = types_of(Settings), facts_of(Settings)
    keywords = {
        name: _keyword(name, getattr(Settings, name), kinds[name])
        for name in sorted(facts, key=lambda name: facts[name].panel != STREAMING)
    }
    keywords |= {name: mine[name] for name in own}
    for name, given in _ORIGINAL.items():
        if name in LLAMA_ARGUMENTS - mine.keys():
            default = False if name == "verbose" else given.default
            keywords[name] = _keyword(name, default, given.annotation)
    first = [keywords.pop(name) for name in _SET_MOST]
    shown = [mine["self"], mine["model_path"], *first, *keywords.values()]
    return inspect.Signature(shown, return_annotation=None)


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
