"""Options that several verbs share, and how their text becomes settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.config import DEFAULT_IO_THREADS, CacheSize
from routeahead.errors import SettingsError

STREAM = "Streaming"

Model = Annotated[
    Path, typer.Argument(help="GGUF file; of a split model, any of its shards.", show_default=False)
]
CacheMb = Annotated[
    str,
    typer.Option(
        help="Expert cache in MiB; 'auto' sizes it from free memory, 0 keeps nothing.",
        rich_help_panel=STREAM,
    ),
]
ForceCache = Annotated[
    bool,
    typer.Option(
        "--force-cache",
        help="Allow a cache smaller than what one token routes to.",
        rich_help_panel=STREAM,
    ),
]
IoThreads = Annotated[
    int, typer.Option(help="Lanes: threads that read experts.", rich_help_panel=STREAM)
]
Overlap = Annotated[
    bool,
    typer.Option(help="Read later projections while earlier ones compute.", rich_help_panel=STREAM),
]
Dense = Annotated[
    str,
    typer.Option(
        help="Dense weights: 'anon' (read once, never dropped) or 'mmap' (mapped lazily).",
        rich_help_panel=STREAM,
    ),
]
DirectIo = Annotated[
    bool,
    typer.Option(help="Read experts past the page cache (O_DIRECT).", rich_help_panel=STREAM),
]
Resident = Annotated[
    bool,
    typer.Option(
        "--resident",
        help="Load everything and stream nothing: the reference to compare with.",
        rich_help_panel=STREAM,
    ),
]

IO_THREADS_DEFAULT = DEFAULT_IO_THREADS


def cache_size(text: str) -> CacheSize:
    """'auto' or a whole number of MiB.

    Raises:
        SettingsError: neither.
    """
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"--cache-mb {text}: give a size in MiB, 0, or auto") from None


def streaming(*, resident: bool, cache_mb: str, **settings: Any) -> dict[str, Any]:
    """Keyword arguments for `routeahead.Llama` from the options above."""
    size = cache_size(cache_mb)
    return {"resident": resident, "cache_mb": size, **settings}
