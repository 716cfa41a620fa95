"""The scripts of examples/clients: each client answers with a streamed model."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routeahead.models import DEFAULT_MODEL

RECIPES = Path(__file__).parents[2] / "examples/clients"
# The script, what has to be installed, and what it prints last. The model is right in all but one:
# instructor sends a chat, which it was not trained on, and only the form of the answer is sure.
ANSWERS = [
    ("guidance", "guidance", "44"),
    ("outlines", "outlines", "44"),
    ("instructor", "instructor", "difference='4"),
    ("langchain", "langchain_community", " 44\n |4|4|||\n44"),
    ("llama_index", "llama_index.llms.llama_cpp", " 44"),
]


def need(module: str) -> None:
    """Skips the test unless the module is installed."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if not found:
        pytest.skip(f"needs {module}: pip install -e '.[clients]'")


@pytest.mark.parametrize(("name", "module", "answer"), ANSWERS, ids=[a[0] for a in ANSWERS])
def test_recipe(name: str, module: str, answer: str) -> None:
    need(module)
    command = [sys.executable, "-W", "ignore", RECIPES / f"with_{name}.py", DEFAULT_MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n").endswith(answer) or answer in done.stdout.splitlines()[-1]


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a running llama_cpp.server."""
    need("fastapi")
    need("sse_starlette")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, RECIPES / "with_server.py", "--model", DEFAULT_MODEL,
               "--n_ctx", "256", "--n_threads", "1", "--port", str(port)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/models").read()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def post(address: str, **request: Any) -> str:
    sent = urllib.request.Request(
        address, json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(sent) as reply:
        return str(reply.read().decode())


def test_server(server: str) -> None:
    """Completions, and a chat that arrives in pieces. Its defaults set use_mlock."""
    prompt = {"prompt": "Question: What is 50 - 6?\nAnswer:", "stop": ["\n"]}
    done = json.loads(post(f"{server}/completions", **prompt, max_tokens=4, temperature=0))
    assert done["choices"][0]["text"] == " 44"
    chat = {"messages": [{"role": "user", "content": "What is 50 - 6?"}], "stream": True}
    lines = post(f"{server}/chat/completions", **chat, max_tokens=4, temperature=0).splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces).strip() == "44"
