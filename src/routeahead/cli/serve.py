"""`routeahead serve`: OpenAI's and Anthropic's APIs over HTTP, and a page that shows the stream."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.cli import options, terminal
from routeahead.cli.open_model import open_model
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout


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
    ray: options.Ray = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="With --ray: models; a conversation stays with one.")
    ] = 1,
    threads: options.Threads = None,
    context: options.Context = None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP: chat, completions and messages, with a page at /."""
    try:
        from routeahead.server import listen
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("routeahead"):
            raise
        raise SettingsError(
            f"serve needs the package {error.name}: pip install 'routeahead[serve]'"
        ) from None
    if replicas > 1 and not ray:
        raise SettingsError("--replicas needs --ray: one process serves one model")
    options.announce(model)
    path = options.model_path(model)
    settings["embedding"] = embeddings
    served: dict[str, Any] = {
        "host": host,
        "keys": api_key,
        "queue": queue,
        "prompts": (prompt_cache or _cache_folder(), prompt_cache_mb * MIB)
        if prompt_cache_mb and not embeddings
        else None,
        "embeds": embeddings,
    }
    if ray:
        _serve_replicas(ray, replicas, path, settings, served, port, (context, threads))
        return
    listening = listen.bind(host, port, api_key)
    address = _address(host, listening.getsockname()[1])
    with listening:
        with terminal.progress() as say:
            llm = open_model(path, settings, say, context=context, threads=threads, waits=True)
        try:
            made = listen.serving(llm, name=_name(llm, path), **served)
            listen.serve(made, listening, ready=lambda: _say_ready(address))
        finally:
            llm.close()


def _name(llm: Llama, path: Path) -> str:
    return str(llm.metadata.get("general.name") or path.stem)


def _address(host: str, port: int) -> str:
    return f"http://{host if ':' not in host else f'[{host}]'}:{port}"


def _say_ready(address: str) -> None:
    print(f"serving {address}", file=sys.stderr, flush=True)


def _serve_replicas(
    cluster: str,
    count: int,
    path: Path,
    settings: dict[str, Any],
    served: dict[str, Any],
    port: int,
    sizes: tuple[int | None, int | None],
) -> None:
    """`sizes` are context and threads, of each replica."""
    from routeahead.server.listen import check_host
    from routeahead.server.replicas import Plan, serve_replicas

    check_host(served["host"], served["keys"])
    if not port:
        raise SettingsError("--port 0: with --ray, give the port")
    context, threads = sizes
    read_layout(path)  # what is wrong with the file is said here, not on a node
    plan = Plan(
        functools.partial(_open_on_node, path, settings, context, threads),
        {**served, "name": path.stem},
        cpus=threads or 1,
        port=port,
    )

    def wait() -> None:
        """Ray has handlers of its own for these signals: they are replaced when it has started."""
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        _say_ready(_address(served["host"], port))
        ended.wait()

    serve_replicas(cluster, count, plan, wait)


def _open_on_node(
    path: Path, settings: dict[str, Any], context: int | None, threads: int | None
) -> Llama:
    return open_model(path, settings, lambda _: None, context=context, threads=threads, waits=True)
