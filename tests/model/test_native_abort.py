"""Files that pass every check and load, and with which llama.cpp cannot compute: it ends the
process, and one line says why."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from support import architectures
from support.gguf_parts import take_apart
from support.llama_library import LlamaLibrary


def no_sections(path: Path) -> None:
    """Rotary positions of three kinds, for which a head has no dimension."""
    parts = take_apart(path)
    parts.change("qwen3vlmoe.rope.dimension_sections", [0, 0, 0, 0]).write(path)


def no_such_expert(path: Path) -> None:
    """The table that gives each token its experts names one that is not there."""
    reader = gguf.GGUFReader(str(path), "r+")
    (table,) = (one for one in reader.tensors if "tid2eid" in one.name)
    table.data[:] = 1000
    reader.data.flush()


@pytest.mark.parametrize(
    ("name", "damage"), [("qwen3vlmoe", no_sections), ("deepseek4", no_such_expert)]
)
def test_one_line_says_with_which_file(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    library = LlamaLibrary()
    try:
        path = architectures.write(tmp_path, name, library)
    finally:
        library.close()
    damage(path)
    line = [sys.executable, "-m", "routeahead.cli.main", "run", str(path), "--raw", "-p", "Hi"]
    line += ["-n", "2", "-t", "1", "-c", "64", "--cache-mb", "8"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"routeahead: llama.cpp cannot compute with {path} and ends the process")
    assert "GGML_ASSERT(" in said and "download it again" in said
