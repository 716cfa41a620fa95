"""Writes `src/routeahead/engine/arguments.py`: keywords of `routeahead.Llama`, for type checkers.

    python tests/support/arguments.py

A setting is declared once, as a field of `routeahead.Settings`, and llama-cpp-python declares its
own arguments; type checkers need both spelt out. `tests/model/test_drop_in.py` compares.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import llama_cpp

from routeahead import Settings
from routeahead.engine.keywords import LLAMA_ARGUMENTS
from routeahead.setting import facts_of, types_of

TARGET = Path(__file__).parents[2] / "src/routeahead/engine/arguments.py"

_NOTE = "    # "
_HEAD = '''\
"""The keyword arguments of `routeahead.Llama`, for type checkers.

Written by `tests/support/arguments.py` from the fields of `routeahead.Settings` and from the
constructor of `llama_cpp.Llama`: not to be edited. Nothing imports it at run time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

'''


def render() -> str:
    """The file's text."""
    imports: set[str] = set()
    blocks = [
        _HEAD,
        "",
        "\n\nclass StreamingArguments(TypedDict, total=False):\n",
        '    """The fields of `routeahead.Settings`."""\n\n',
    ]
    kinds = types_of(Settings)
    for name, facts in facts_of(Settings).items():
        comment = textwrap.fill(facts.help, 100, initial_indent=_NOTE, subsequent_indent=_NOTE)
        blocks.append(f"{comment}\n    {name}: {_spell(kinds[name], imports)}\n")
    blocks.append("\n\nclass Arguments(StreamingArguments, total=False):\n")
    blocks.append('    """And what `llama_cpp.Llama` takes."""\n\n')
    hints = get_type_hints(llama_cpp.Llama.__init__, vars(sys.modules["llama_cpp.llama"]))
    for name in inspect.signature(llama_cpp.Llama.__init__).parameters:
        if name in LLAMA_ARGUMENTS and name != "model_path":
            blocks.append(f"    {name}: {_spell(hints[name], imports)}\n")
    blocks[1] = "\n".join(sorted(imports)) + "\n"
    return "".join(blocks)


def _spell(kind: Any, imports: set[str]) -> str:
    """A type as an annotation; adds the import statements that it needs."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return "None"
    if kind is Ellipsis:
        return "..."
    if origin in (Union, UnionType):
        return " | ".join(_spell(one, imports) for one in arguments)
    if origin is Literal:
        return "Literal[" + ", ".join(f'"{one}"' for one in arguments) + "]"
    if origin:
        return f"{origin.__name__}[{', '.join(_spell(one, imports) for one in arguments)}]"
    if kind.__module__.startswith("llama_cpp"):
        imports.add(f"from {kind.__module__} import {kind.__name__}")
    return "str | Path" if kind is Path else str(kind.__name__)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
