"""`routeahead pack`: a model's file with each expert in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeahead.cli import options, terminal
from routeahead.engine.packing import write_packed
from routeahead.experts.layout import MIB


def pack(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="GGUF file (of a split model, any of its shards), or hf:OWNER/REPO:QUANT.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)
    ],
) -> None:
    """Write a model anew so that an expert is one read instead of three. For routeahead alone.

    OUT has the same weights, each expert's side by side, and gives the same tokens. Other programs
    refuse it.

    \b
    routeahead pack model.gguf model.packed.gguf
    routeahead run model.packed.gguf -p "Hello"
    """
    source = options.model_path(model)
    with terminal.progress() as say:

        def wrote(done: int, total: int) -> None:
            say(lambda: f"writing: {done // MIB:,} of {total // MIB:,} MiB")

        write_packed(source, target, progress=wrote)
    terminal.note(f"packed into {target}")
