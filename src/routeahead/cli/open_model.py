"""Opens a model for the verbs that generate, and says meanwhile what takes so long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from routeahead.cli import terminal
from routeahead.cli.collector import no_collection
from routeahead.config import Settings
from routeahead.engine.llama import Llama
from routeahead.experts.layout import MIB
from routeahead.llamacpp import node_filter
from routeahead.telemetry.recorder import NOTHING, Outputs

DEFAULT_CONTEXT = 4096


def open_model(
    model: Path,
    settings: dict[str, Any],
    say: Callable[[Callable[[], str]], None],
    *,
    context: int | None = None,
    threads: int | None = None,
    outputs: Outputs = NOTHING,
    waits: bool = False,
) -> Llama:
    """Loads a model, and says meanwhile what it does.

    Args:
        settings: keyword arguments of `Llama`.
        say: shows a line, made when it is needed (`terminal.progress`).
        context: tokens; None for 4096, or the model's if smaller.
        waits: it waits for people between two answers, and lanes may use that.
    """
    if waits and Settings.split(settings)[0].fills_while_waiting:
        settings = {**settings, "fill_cache": True}
    if not settings["resident"]:
        say(lambda: "compiling the node filter, or loading what was compiled")
        with no_collection():
            node_filter.compiled()
    say(lambda: "loading the model")

    def loaded(done: int, total: int) -> None:
        say(lambda: f"loading: {done // MIB:,} of {total // MIB:,} MiB of dense weights")

    llm = Llama(
        model,
        n_ctx=context or DEFAULT_CONTEXT,
        cap_context=context is None,
        n_threads=threads,
        outputs=outputs,
        progress=loaded,
        **settings,
    )
    trained = int(llm.layout.value("context_length") or 0)
    if context and trained and context > trained:
        terminal.note(
            f"-c {context} is more than the {trained} tokens that the model was trained on: "
            "what is beyond may make no sense"
        )
    return llm
