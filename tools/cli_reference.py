"""Writes docs/cli.md: every verb and option, from the parser itself.

python tools/cli_reference.py docs/cli.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from jinja2 import Environment

from routeahead.cli.app import app

_TEMPLATE = """\
# Commands

What `routeahead VERB --help` says (`python tools/cli_reference.py docs/cli.md` writes this page). A
SIZE is MiB, or a number with a unit, as 4G. The exit status is 0, 1 for what you can mend, 2 for a
wrong command line, and 128 plus its number after a signal.

| verb | |
|---|---|
{% for verb in verbs %}
| [`{{ verb.name }}`](#{{ verb.name }}) | {{ verb.summary }} |
{% endfor %}
{% for verb in verbs %}

## {{ verb.name }}

```sh
routeahead {{ verb.usage }}
```

{{ verb.text }}
{% if verb.examples %}

```sh
{{ verb.examples }}
```
{% endif %}
{% for panel, options in verb.panels.items() %}

{{ "**" ~ panel ~ "**" }}

| {{ "argument" if panel == "Arguments" else "option" }} | | default |
|---|---|---|
{% for option in options %}
| {{ option.name }} | {{ option.help }} | {{ option.default }} |
{% endfor %}
{% endfor %}
{% endfor %}
"""
# How the name of a type begins, in any version of Typer → what stands for its values here.
_KINDS = {"int": "N", "float": "X", "path": "PATH"}


def main() -> None:
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


def page() -> str:
    root: Any = typer.main.get_command(app)
    with root.make_context("routeahead", [], resilient_parsing=True) as context:
        verbs = [
            _verb(name, root.get_command(context, name)) for name in root.list_commands(context)
        ]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE).render(verbs=verbs)


def _verb(name: str, command: Any) -> dict[str, Any]:
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    panels: dict[str, list[dict[str, str]]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if parameter in arguments:
            panel = "Arguments"
        else:
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
        panels.setdefault(panel, []).append(_row(parameter))
    return {
        "name": name,
        "summary": _cell(text.partition("\n\n")[0]),
        "usage": " ".join([name, *map(_placeholder, arguments), "[OPTIONS]"]),
        "text": text.strip(),
        "examples": examples.strip(),
        "panels": panels,
    }


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("[]").removesuffix("...").upper()
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _row(parameter: Any) -> dict[str, str]:
    if parameter.param_type_name == "argument":
        name = f"`{_placeholder(parameter)}`"
    else:
        value = "" if parameter.is_flag else f" {_kind(parameter)}"
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        name = _cell(f"`{names}{value}`")
    text = _cell(" ".join((parameter.help or "").split()))
    return {"name": name, "help": text, "default": _cell("".join(_default(parameter)))}


def _kind(parameter: Any) -> str:
    """The placeholder of an option's value."""
    if parameter.metavar:
        return _choice(str(parameter.metavar).split("|"))
    described = getattr(parameter, "type_descriptor", None)
    if described is None:  # a Typer that is built on click
        choices, name = getattr(parameter.type, "choices", ()), parameter.type.name
    else:
        kind = described.annotation
        name = getattr(kind, "__name__", str(kind))
        choices = kind if isinstance(kind, type) and issubclass(kind, Enum) else ()
    if choices := [str(getattr(one, "value", one)) for one in choices or ()]:
        return _choice(choices)
    known = (shown for start, shown in _KINDS.items() if name.lower().startswith(start))
    return next(known, "TEXT")


def _choice(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{{{','.join(values)}}}"


def _default(parameter: Any) -> Iterator[str]:
    """What is shown as the default, as `--help` does."""
    shown = getattr(parameter, "show_default", None)
    value = parameter.default
    if isinstance(shown, str):
        yield shown
    elif parameter.required:
        yield "required"
    elif shown and isinstance(value, bool):
        names = parameter.opts if value else parameter.secondary_opts
        yield f"`{names[0]}`" if names else ""
    elif shown and value not in (None, "", (), []) and not callable(value):
        yield f"`{getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    """For a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
