"""Rooms import what their `__init__.py` says that they know, and no other room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src/routeahead"
SHARED = {"errors", "types"}
MAY_IMPORT = {
    "errors.py": set(),
    "types.py": set(),
    "cgroup.py": set(),
    "experts": SHARED,
    "telemetry": SHARED | {"experts"},
    "replay": SHARED | {"config", "experts", "telemetry"},
}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_no_other(room: str) -> None:
    path = PACKAGE / room
    imported = {
        (file.name, name.split(".")[1])
        for file in ([path] if path.is_file() else path.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (name := node.module or "").startswith("routeahead.")
    }
    others = {(file, name) for file, name in imported if name not in MAY_IMPORT[room] | {room}}
    assert others == set()
