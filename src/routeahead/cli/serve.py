"""`routeahead serve`: OpenAI's and Anthropic's APIs over HTTP, and a page that shows the stream."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.cli import options, terminal
from routeahead.cli.open_model import open_model
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "routeahead" / "prompts"


@options.with_settings
def serve(
    model: options.Model = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        list[str],
        typer.Option(
            envvar="ROUTEAHEAD_API_KEY",
            help="A key that clients must send; may be given several times.",
            metavar="KEY",
            show_default=False,
        ),
    ] = [],  # noqa: B006 (typer reads it and nothing changes it)
    queue: Annotated[
        int, typer.Option(min=0, max=10000, help="Requests that may wait; others get status 429.")
    ] = 64,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for conversations, which a later process goes on with.",
            show_default="~/.cache/routeahead/prompts",
        ),
    ] = None,
    prompt_cache_mb: Annotated[
        int, typer.Option(min=0, help="MiB that they may take on disk; 0 keeps none.")
    ] = 1024,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Serve /v1/embeddings, and no answers.")
    ] = False,
    threads: options.Threads = None,
    context: options.Context = None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP: chat, completions and messages, with a page at /."""
    try:
        from routeahead.server.listen import bind, serve
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("routeahead"):
            raise
        raise SettingsError(
            f"serve needs the package {error.name}: pip install 'routeahead[serve]'"
        ) from None
    options.announce(model)
    path = options.model_path(model)
    listening = bind(host, port, api_key)
    address = f"http://{host if ':' not in host else f'[{host}]'}:{listening.getsockname()[1]}"
    with listening:
        settings["embedding"] = embeddings
        with terminal.progress() as say:
            llm = open_model(path, settings, say, context=context, threads=threads)
        try:
            serve(
                llm,
                listening,
                name=str(llm.metadata.get("general.name") or path.stem),
                keys=api_key,
                queue=queue,
                prompts=(prompt_cache or _cache_folder(), prompt_cache_mb * MIB)
                if prompt_cache_mb and not embeddings
                else None,
                embeds=embeddings,
                ready=lambda: print(f"serving {address}", file=sys.stderr, flush=True),
            )
        finally:
            llm.close()
