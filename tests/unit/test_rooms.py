"""The rooms of the package and the arrows between them are those of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "routeahead"
SHARED = {"errors", "types", "setting", "machine_code"}  # that every room may import


def room(module: str) -> str:
    """The first name below the package: a folder, or a module on top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "routeahead"}


def arrows() -> dict[str, set[str]]:
    """Room → rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        here = parts[0].removesuffix(".py")
        if here not in ("__init__", "__main__"):
            found.setdefault(here, set()).update(map(room, imports(path)))
    rooms = found.keys() - SHARED
    return {here: (found[here] & rooms) - {here} for here in rooms}


def documented() -> dict[str, set[str]]:
    """The same from the table of rooms in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("<!-- rooms -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)?` \|.*\|([^|]*)\|$", table, re.M)
    return {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}


def test_the_table_of_rooms_has_every_import_and_no_other() -> None:
    assert documented() == arrows()


def test_arrows_go_one_way() -> None:
    """No room imports one that leads back to it."""
    graph, reached = arrows(), dict[str, set[str]]()

    def below(name: str, path: tuple[str, ...] = ()) -> set[str]:
        assert name not in path, " → ".join((*path, name))
        if name not in reached:
            reached[name] = set().union(
                *(below(other, (*path, name)) | {other} for other in graph[name])
            )
        return reached[name]

    for name in graph:
        below(name)


def test_who_may_see_what() -> None:
    """Policies never see ctypes, and what moves bytes never sees routing."""
    for folder, forbidden in {
        "policies": {"ctypes", "llama_cpp"},
        "routing": {"ctypes", "llama_cpp"},
        "experts": {"llama_cpp"},
        "prediction": {"ctypes", "llama_cpp"},
    }.items():
        for path in (PACKAGE / folder).glob("*.py"):
            named = {
                name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for name in (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                )
            }
            assert not named & forbidden, path
    assert "routing" not in arrows()["experts"]


def test_files_that_the_walks_name_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walks = text.split("## Three walks")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", walks)
    assert len(named) > 12
    for name in named:
        assert (PACKAGE / name).is_file(), name
