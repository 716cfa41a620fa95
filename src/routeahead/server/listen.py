"""A server from its socket to its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.server.app import Served, make_app
from routeahead.server.evaluator import Evaluator
from routeahead.server.guard import LOOPBACK
from routeahead.server.live import Live
from routeahead.server.prompt_cache import PromptCache
from routeahead.server.turn import Turns

_log = logging.getLogger(__name__)

GRACE_S = 5.0  # for the running answer, once the server is told to stop


def bind(host: str, port: int, keys: Sequence[str]) -> socket.socket:
    """A socket for the server; port 0 takes a free one.

    Raises:
        SettingsError: the address cannot be had, or it is open to others and there is no key.
    """
    check_host(host, keys)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        reason = error.strerror or error
        raise SettingsError(f"--host {host} --port {port}: cannot listen there: {reason}") from None
    return made


def check_host(host: str, keys: Sequence[str]) -> None:
    """
    Raises:
        SettingsError: others can reach the server, and it has no key.
    """
    if host not in LOOPBACK and not keys:
        raise SettingsError(f"--host {host}: others can reach it, so give --api-key too")


@dataclass(frozen=True)
class Serving:
    """An application, and the evaluation thread behind it, which is not started yet."""

    app: ASGIApp
    evaluator: Evaluator


def serving(
    llm: Llama,
    *,
    name: str,
    host: str,
    keys: Sequence[str],
    queue: int,
    prompts: tuple[Path, int] | None,
    embeds: bool,
) -> Serving:
    """What serves a model on `host`; the model is the evaluation thread's from its start.

    Args:
        queue: requests that may wait.
        prompts: folder and bytes for conversations; None to keep none.
        embeds: the model was loaded for embeddings.

    Raises:
        SettingsError: the folder cannot be used.
    """
    cache = _prompt_cache(llm, prompts)
    live = Live(llm)
    evaluator = Evaluator(llm, live, cache, queue)
    served = Served(name, evaluator, live, Turns(llm, cache), _about(llm, name), embeds)
    return Serving(make_app(served, keys=keys, loopback=host in LOOPBACK), evaluator)


def serve(made: Serving, listening: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C. The model is the evaluation thread's until this returns.

    Args:
        ready: called when requests are taken.
    """
    config = uvicorn.Config(
        made.app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 << 10,
    )
    # Uvicorn raises the signals that ended it once more: these handlers let the rest be done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    made.evaluator.start()
    try:
        asyncio.run(_Server(config, made.evaluator, ready).serve(sockets=[listening]))
    finally:
        made.evaluator.close()


class _Server(uvicorn.Server):
    """Ends the evaluation before the connections, so that each response gets an end."""

    def __init__(
        self, config: uvicorn.Config, evaluator: Evaluator, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._evaluator, self._ready = evaluator, ready
        self._complain_from = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._evaluator.close, GRACE_S)
        await super().shutdown(sockets)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What no request meets with.

        Without a free descriptor, asyncio says so every second, as often as connections may wait:
        here, once a minute. It tries again a second later, when the socket may have been closed.
        """
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            if loop.time() >= self._complain_from:
                self._complain_from = loop.time() + 60
                _log.warning("connections wait: too many open files: raise `ulimit -n`")
        elif not (self.should_exit and isinstance(error, ValueError)):
            loop.default_exception_handler(context)


def _prompt_cache(llm: Llama, prompts: tuple[Path, int] | None) -> PromptCache | None:
    if not prompts:
        return None
    folder, limit = prompts
    try:
        return PromptCache(folder, limit, llm)
    except OSError as error:
        raise SettingsError(f"--prompt-cache {folder}: cannot be used: {error.strerror}") from None


def _about(llm: Llama, name: str) -> dict[str, Any]:
    layout = llm.layout
    return {
        "name": name,
        "arch": layout.arch,
        "experts": layout.n_expert,
        "top_k": layout.n_expert_used,
        "layers": len(layout.moe_layers),
        "file_mib": layout.file_bytes // MIB,
        "context": llm.room,
        "resident": llm.source is None,
        "route_ahead": llm.settings.route_ahead,
    }
