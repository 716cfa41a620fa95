"""A headless Chromium, driven through the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """One page. Close it when done.

    Attributes:
        requested: URLs that it asked for.
        messages: what its console said, and exceptions.
    """

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        assert PROGRAM
        ours_out, theirs_in, theirs_out, ours_in = *os.pipe()[::-1], *os.pipe()[::-1]
        self._number = itertools.count(1)
        self._pending = b""
        self.requested: list[str] = []
        self.messages: list[Any] = []
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-background-networking "
            f"--no-first-run --remote-debugging-pipe --window-size={width},{height} "
            f"--user-data-dir={profile} about:blank"
        )
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *flags.split()],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, ours_in
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    _session = None

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._number)
        command = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._in, 1 << 16)
            assert part, "Chromium has ended"
            self._pending += part
        data, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(data)
        if found.get("method") == "Network.requestWillBeSent":
            self.requested.append(found["params"]["request"]["url"])
        elif found.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.messages.append(found["params"])
        return found

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """The value of an expression as soon as it is true."""
        until = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < until, expression
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._out)
        os.close(self._in)
