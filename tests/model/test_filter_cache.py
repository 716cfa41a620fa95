"""The node filter's machine code on disk: used if nothing changed, and never if something did."""

from __future__ import annotations

import shutil
from pathlib import Path

import numba
import pytest
from numba.core import caching

from routeahead.llamacpp import ggml, node_filter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba keeps machine code now."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start() -> int:
    """The filter as a process that starts gets it: how often it came from the disk."""
    hits: int = node_filter.compiled.__wrapped__().cache_hits
    return hits


def test_every_constant_is_a_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op codes, words of the struct and whatever else the machine code may have in it."""
    constants = [
        (module, name)
        for module in (node_filter, ggml)
        for name, value in vars(module).items()
        if type(value) is int
    ]
    assert {"_MUL_MAT_ID", "_NAME_WORD", "STATE_WORDS", "MAX_DIMS"} <= {n for _, n in constants}
    seen = {node_filter._frozen()}
    assert node_filter._frozen() in seen
    for module, name in constants:
        with monkeypatch.context() as changed:
            changed.setattr(module, name, getattr(module, name) + 1)
            seen.add(node_filter._frozen())
    assert len(seen) == 1 + len(constants)


def test_every_file_that_may_be_compiled_is_a_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = node_filter._frozen()
    folder = Path(shutil.copytree(Path(node_filter.__file__).parent, tmp_path / "llamacpp"))
    monkeypatch.setattr(node_filter, "__file__", str(folder / "node_filter.py"))
    assert node_filter._frozen() == before
    with (folder / "ggml.py").open("a") as file:
        file.write("# changed")
    assert node_filter._frozen() != before


def test_code_on_disk_is_used_unless_ggml_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [start(), start()] == [0, 1]
    monkeypatch.setattr(node_filter, "_MUL_MAT_ID", node_filter._MUL_MAT_ID + 1)
    assert start() == 0
    monkeypatch.undo()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    assert start() == 1  # neither has displaced the other


def test_a_folder_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(locator: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    assert start() == 0


def test_a_damaged_file_costs_only_time(folder: Path) -> None:
    assert start() == 0
    for path in folder.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[:100])
    assert start() == 0
    for path in folder.rglob("*.nbi"):
        path.write_bytes(b"no index")
    assert start() == 0
