"""What `routeahead serve` refuses before it serves (tests/server has the rest)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.commands import Command

from routeahead.models import DEFAULT_MODEL

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


def refused(command: Command, *arguments: object) -> str:
    done = command("serve", DEFAULT_MODEL, "-t", 1, "--cache-mb", 2, *arguments)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 1 and line.startswith("routeahead: ")
    return line


def test_an_address_that_cannot_be_had(command: Command) -> None:
    assert "others can reach it, so give --api-key too" in refused(command, "--host", "0.0.0.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}: cannot listen there" in refused(command, "--port", port)


def test_a_folder_that_cannot_be_used(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(command, "--port", 0, "--prompt-cache", tmp_path / "file" / "x")
    assert f"--prompt-cache {tmp_path / 'file' / 'x'}: cannot be used" in line
