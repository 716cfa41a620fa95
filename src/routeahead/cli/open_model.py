"""Opens a model for a conversation, of one user or of many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from routeahead.engine.llama import Llama

DEFAULT_CONTEXT = 4096


def open_model(
    model: Path, settings: dict[str, Any], *, context: int | None, threads: int | None
) -> Llama:
    """Loads a model with a progress bar over its dense weights.

    Args:
        settings: keyword arguments of `Llama`.
        context: tokens; None for 4096, or the model's if smaller.
    """
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("dense", total=None)
        return Llama(
            model,
            n_ctx=context or DEFAULT_CONTEXT,
            cap_context=context is None,
            n_threads=threads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **settings,
        )
