"""A `routeahead serve` of its own process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from routeahead.models import DEFAULT_MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


class Server:
    """Starts it and waits until it serves; `stop` or leaving the context ends it.

    Attributes:
        client: talks with it.
        errors: lines that it wrote to stderr.
    """

    def __init__(self, folder: Path, *arguments: object, environment: Any = None) -> None:
        line = [sys.executable, "-m", "routeahead.cli.main", "serve", DEFAULT_MODEL, "-t", 1]
        line += ["--port", 0, "--prompt-cache", folder, *arguments]
        self.process = subprocess.Popen(
            [str(part) for part in line],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.errors: list[str] = []
        self._serving = threading.Event()
        self.url = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._serving.wait(90) and self.url, self.errors
        self.client = httpx.Client(base_url=self.url, timeout=90)

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            if line.strip():
                self.errors.append(line.rstrip())
            if found := re.search(r"serving (http://\S+)", line):
                self.url = found[1]
                self._serving.set()
        self._serving.set()  # it has ended

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def ask(self, question: str, **body: Any) -> Any:
        """A question's chat completion, greedy unless told otherwise."""
        messages = [{"role": "user", "content": question}]
        done = self.post(CHAT, messages=messages, **{"temperature": 0, **body})
        assert done.status_code == 200, done.text
        return done.json()

    def counters(self) -> dict[str, Any]:
        found = self.client.get("/api/stream")
        assert found.status_code == 200
        return dict(found.json())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(60)
        self._reading.join(10)
        return status

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
