"""A hub of this machine: the requests that huggingface_hub makes, answered as the hub answers them.

Two addresses: the hub, which redirects to the second, as the real one does to its content network.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 16 << 10


class Asked(NamedTuple):
    """A request: `range` and `token` are empty if it has none."""

    method: str
    path: str
    range: str
    token: str
    content: bool


@dataclass
class Hub:
    """Serves `files` until it is closed.

    Attributes:
        files: "owner/repo/path" → content.
        lies: paths whose checksum the hub states wrongly.
        sizes: paths of which it states another size.
        gated: repositories that need a token.
        cut: bytes after which the next answers of content break off, one entry an answer.
        pause_s: between two pieces of content.
        asked: every request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    lies: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: list[int] = field(default_factory=list)
    pause_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self._servers = [self._serve(content) for content in (False, True)]
        self.url, self._content_url = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def _serve(self, content: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            def answer(self) -> None:
                token = self.headers.get("authorization", "")
                wanted = self.headers.get("range", "")
                path = unquote(urlsplit(self.path).path)
                hub.asked.append(Asked(self.command, path, wanted, token, content))
                (hub._content if content else hub._hub)(self, path)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def gets(self) -> list[Asked]:
        """Requests for content."""
        return [one for one in self.asked if one.content and one.method == "GET"]

    def _hub(self, to: _Handler, path: str) -> None:
        parts = path.strip("/").split("/")
        repo = "/".join(parts[2:4]) if parts[:2] == ["api", "models"] else "/".join(parts[:2])
        token = to.headers.get("authorization")
        if not any(name.startswith(f"{repo}/") for name in self.files):
            to.refuse(401, "RepoNotFound")
        elif parts[0] == "api":
            to.send_json(self._info(repo))
        elif repo in self.gated and not token:
            to.refuse(403, "GatedRepo")
        else:
            name = f"{repo}/{'/'.join(parts[4:])}"
            if name not in self.files:
                to.refuse(404, "EntryNotFound")
                return
            headers = {
                "Location": f"{self._content_url}/{name}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{self._sha256(name)}"',
                "X-Linked-Size": str(self._size(name)),
            }
            to.send(302, headers)

    def _info(self, repo: str) -> dict[str, object]:
        siblings = [
            {
                "rfilename": name.removeprefix(f"{repo}/"),
                "size": self._size(name),
                "blobId": "0" * 40,
                "lfs": {"sha256": self._sha256(name), "size": self._size(name), "pointerSize": 1},
            }
            for name in self.files
            if name.startswith(f"{repo}/")
        ]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}

    def _sha256(self, name: str) -> str:
        content = self.files[name] + (b"!" if name in self.lies else b"")
        return hashlib.sha256(content).hexdigest()

    def _size(self, name: str) -> int:
        return self.sizes.get(name, len(self.files[name]))

    def _content(self, to: _Handler, path: str) -> None:
        data, wanted = self.files[path.strip("/")], to.headers.get("range", "")
        begin, end = 0, len(data)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
        headers = {"Content-Length": str(end - begin), "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        to.send(206 if wanted else 200, headers)
        if to.command == "HEAD":
            return
        stop = min(end, begin + self.cut.pop(0)) if self.cut else end
        for at in range(begin, stop, _PIECE):
            piece = data[at : min(at + _PIECE, stop)]
            to.wfile.write(piece)
            self.sent += len(piece)
            time.sleep(self.pause_s)
        to.close_connection = stop < end


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        try:
            self.answer()
        except (BrokenPipeError, ConnectionResetError):  # the client is gone
            self.close_connection = True

    do_HEAD = do_GET

    def send(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send(status, {"X-Error-Code": code, "X-Error-Message": code})

    def log_message(self, format: str, *args: object) -> None:
        pass
