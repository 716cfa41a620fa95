"""Jobs on the nodes of a Ray cluster: one at a time on each, so that none disturbs another's time.

routeahead, in the same version, and the files that jobs name have to be on every node, under the
same paths. Ray is imported when a cluster is opened.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType
from typing import Any, NoReturn

from routeahead.errors import RouteAheadError, SettingsError

CONNECT_S = 10.0


@dataclass(frozen=True)
class Node:
    id: str
    cpus: float


class Cluster:
    """A connection to a cluster, until the `with` block ends.

    Attributes:
        nodes: those that have processors.
    """

    def __init__(self, address: str) -> None:
        """
        Args:
            address: as Ray takes it: HOST:PORT, auto, or local for one of this machine alone.

        Raises:
            SettingsError: Ray is missing, or there is no cluster at that address.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported
        try:
            import ray
        except ImportError:
            raise SettingsError("--ray needs Ray: pip install 'routeahead[ray]'") from None
        self._ray: Any = ray
        _check_listening(address)
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if address == "local":
            options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        # Ray puts a handler of its own in place, which prints a stack and ends the process.
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, **options)
            signal.signal(signal.SIGTERM, terminated)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise SettingsError(f"--ray {address}: cannot connect: {reason}") from None
        self.nodes = [
            Node(node["NodeID"], node["Resources"]["CPU"])
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        ]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ray.shutdown()

    def map(
        self, function: Callable[..., Any], jobs: Sequence[Sequence[Any]], *, parts: int = 1
    ) -> Iterator[tuple[int, list[Any]]]:
        """Calls `function` with each job's arguments; gives its index and result as they come.

        With more `parts`, the result is that many objects, which stay where they were made: each is
        a reference for `get`, or for the arguments of another job, where a list may hold it.

        Raises:
            RouteAheadError: a job did, or its node has another version of this package.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        called = self._ray.remote(_checked)
        waiting, free = deque(enumerate(jobs)), list(self.nodes)
        running: dict[Any, tuple[int, Node, list[Any]]] = {}
        while waiting or running:
            while waiting and free:
                (index, job), node = waiting.popleft(), free.pop(0)
                made = called.options(
                    num_cpus=node.cpus,
                    num_returns=parts,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                ).remote(version("routeahead"), function, *job)
                references = made if isinstance(made, list) else [made]
                running[references[0]] = index, node, references
            [done], _ = self._ray.wait(list(running), num_returns=1)
            index, node, references = running.pop(done)
            free.append(node)
            if parts == 1:
                yield index, [self.get(references[0])]
            else:
                yield index, references

    def get(self, reference: Any) -> Any:
        """What a reference stands for.

        Raises:
            RouteAheadError: the job that should have made it failed.
        """
        from ray.exceptions import RayError

        try:
            return self._ray.get(reference)
        except RayError as error:
            _fail(error)


def _check_listening(address: str) -> None:
    """Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"--ray {address}: cannot connect: {reason}") from None


def _fail(error: Exception) -> NoReturn:
    cause = getattr(error, "cause", None)
    if isinstance(cause, RouteAheadError):
        raise type(cause)(str(cause)) from None
    lines = str(cause or error).strip().splitlines()
    raise RouteAheadError(
        f"a job failed on the cluster: {lines[-1] if lines else error!r}"
    ) from None


def _checked(expected: str, function: Callable[..., Any], *job: Any) -> Any:
    """On the node."""
    if (found := version("routeahead")) != expected:
        raise SettingsError(f"a node has routeahead {found} and not {expected}")
    return function(*job)


def fetched(references: Sequence[Any]) -> list[Any]:
    """On a node: what references within a job's arguments stand for."""
    import ray

    found: list[Any] = ray.get(list(references))
    return found
