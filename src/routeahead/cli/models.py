"""`routeahead pull`, `list` and `rm`: models of the Hugging Face hub, and their copies here."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from routeahead.cli import terminal
from routeahead.cli.terminal import Column, print_facts, print_table
from routeahead.hub.download import pull as pull_model
from routeahead.hub.reference import amount, parse
from routeahead.hub.store import models_folder, remove, stored, unfinished

Reference = Annotated[
    str, typer.Argument(metavar="OWNER/REPO:QUANT", help="Model of the hub.", show_default=False)
]


def pull(model: Reference) -> None:
    """Fetch a model from the Hugging Face hub, all shards, checksums compared.

    What an interrupted pull fetched is kept, and the next one goes on from there.

    Without a quantisation: Q4_K_M, or the only one there is.

    \b
    routeahead pull unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M
    routeahead run hf:unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M -p "Hello"
    """
    print(pull_model(parse(model), terminal.note))


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """List the models that were pulled."""
    models, parts = list(stored()), list(unfinished())
    if as_json:
        found = [
            {"name": str(one.reference), "bytes": one.size, "path": str(one.paths[0])}
            for one in models
        ]
        begun = [{"path": str(place), "bytes": size} for place, size in parts]
        print(json.dumps({"models": found, "unfinished": begun}, indent=2))
        return
    if models:
        days = [time.strftime("%Y-%m-%d", time.localtime(one.changed_s)) for one in models]
        sizes = [amount(one.size) for one in models]
        names = [str(one.reference) for one in models]
        print_table("model", names, [Column("size", sizes), Column("pulled", days)])
    elif not parts:
        print(f"no models in {models_folder()}; `routeahead pull OWNER/REPO:QUANT` fetches one")
    rows = [(f"{amount(size)} of", str(place)) for place, size in parts]
    if rows:
        print("unfinished (pull again to go on):")
        print_facts(rows)


def rm(model: Reference) -> None:
    """Delete a model that was pulled, and what an interrupted pull left of it."""
    name, size = remove(parse(model))
    print(f"deleted {name} ({amount(size)})")
