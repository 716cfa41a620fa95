"""The scripts of examples/recipes: each client talks with a real `serve`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from support.servers import Server

pytestmark = pytest.mark.xdist_group("server")

RECIPES = Path(__file__).parents[2] / "examples/recipes"
# The script, what has to be installed, and lines that it prints beside the answer. What the model
# itself says is sure of sums only: it was not trained on tools or schemas, but keeps to them.
SCRIPTS = [
    ("openai", "openai", ["streamed: 42", "by schema: "]),
    ("anthropic", "anthropic", ["calls: add ['a', 'b']", "streamed: 42"]),
    ("langchain", "langchain_openai", ["by schema: ", "streamed: 42"]),
    ("dspy", "dspy", ["by signature: int"]),
    ("smolagents", "smolagents", ["calls: ['"]),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # smolagents' instructions are longer than the context that the model was trained on.
    with Server(tmp_path_factory.mktemp("prompts"), "-c", 2048) as running:
        yield running


def test_every_recipe_is_run() -> None:
    assert {f"with_{name}.py" for name, _, _ in SCRIPTS} == {p.name for p in RECIPES.glob("*.py")}


@pytest.mark.parametrize(("name", "module", "lines"), SCRIPTS, ids=[s[0] for s in SCRIPTS])
def test_recipe(server: Server, name: str, module: str, lines: list[str]) -> None:
    if not importlib.util.find_spec(module):
        pytest.skip(f"needs {module}: pip install -e '.[recipes]'")
    # Nothing is asked of the network: whatever is not the server's address is refused at once.
    away = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", RECIPES / f"with_{name}.py", server.url],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **away, "NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[-1] == "answer: 42"
    for line in lines:
        assert any(one.startswith(line) for one in printed), done.stdout
