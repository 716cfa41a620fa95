"""docs/llama-cpp.md lists all that is used of llama-cpp-python and ggml beyond their public API."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import llama_cpp

from routeahead.llamacpp import ggml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/routeahead"
PAGE = ROOT / "docs/llama-cpp.md"
Uses = set[tuple[str, str]]  # (name, file that uses it)


MODULES = {"gguf_file", "gguf_check", "gguf_metadata"}  # of ours


def documented(heading: str) -> Uses:
    """The first two columns of the table under a heading: a name, and the files that use it."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section.partition("\n## ")[0], re.MULTILINE)
    return {(name, file) for name, files in lines for file in re.findall(r"`([^`]+)`", files)}


def sources() -> Iterator[tuple[str, str]]:
    """(name in the page, text) of each file of the package, and of each benchmark."""
    for folder, prefix in ((PACKAGE, ""), (ROOT / "benchmarks", "benchmarks/")):
        for path in sorted(folder.rglob("*.py")):
            yield prefix + str(path.relative_to(folder)), path.read_text(encoding="utf-8")


def private_names(text: str) -> Iterator[str]:
    of_llama = set(re.findall(r"\bself\.(_(?!_)\w+)", inspect.getsource(llama_cpp.Llama)))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llama_cpp._"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr in of_llama:
            yield f"Llama.{node.attr}"
        elif isinstance(node, ast.Constant) and node.value in of_llama:  # hasattr(self, "_stack")
            yield f"Llama.{node.value}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("._ctx"):
            yield f"LlamaContext.{node.attr}"


def handles_llama(text: str) -> bool:
    """Other files have attributes of the same names, on objects of their own."""
    return bool(
        re.search(
            r"^\s*(import llama_cpp|from llama_cpp|from .* import Llama\b)", text, re.MULTILINE
        )
    )


def test_private_names_of_llama_cpp_python() -> None:
    found = {
        (name, file)
        for file, text in sources()
        if handles_llama(text)
        for name in private_names(text)
    }
    assert documented("Private names of llama-cpp-python") == found


def test_structs() -> None:
    found = {
        (name, file) for file, text in sources() for name in re.findall(r"`struct (\w+)`", text)
    }
    assert documented("Structs") == found


def test_every_mirrored_struct_says_which_it_is() -> None:
    silent = [
        f"{file}: {node.name}"
        for file, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == "ctypes.Structure" for base in node.bases)
        and "`struct " not in (ast.get_docstring(node) or "")
    ]
    assert silent == []


def test_exported_functions() -> None:
    found = {
        (name, file)
        for file, text in sources()
        for name in re.findall(r"\.((?:ggml|gguf)_\w+)", text)
        if name not in MODULES and not hasattr(llama_cpp, name)
    }
    assert documented("Exported functions of ggml") == found
    declared = ggml._SIGNATURES.keys() | ggml._COMPUTE.keys()
    assert {name for name, _ in found} == declared  # a name that nobody uses can make a start fail
