"""`routeahead calibrate`: routers that predict earlier layers' routings better than their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.calibration.calibrate import (
    DEFAULT_CONTEXT,
    DEFAULT_TOKENS,
    Calibration,
    Request,
)
from routeahead.cli import options, terminal
from routeahead.cli.terminal import Column, bars, console, print_table
from routeahead.errors import SettingsError
from routeahead.experts.layout import shard_paths
from routeahead.machine.cpus import default_threads
from routeahead.prediction.gates import Gates, read_gates, write_gates
from routeahead.telemetry.output_files import check_apart, check_writable

_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


def calibrate(
    model: options.Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A document, UTF-8, or .jsonl with a document a line; give several."),
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(
            min=0.5,
            metavar="N",
            help="MoE layers early, or 0.5: from what the layer's own attention is given; give it "
            "once for each.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="File to write, for --route-ahead-gates; an older one is extended.")
    ] = Path("gates.safetensors"),
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="Only these layers, where memory is short.",
            show_default="all",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the documents to take at most.")
    ] = DEFAULT_TOKENS,
    context: Annotated[
        int, typer.Option("--context", "-c", min=8, help="Tokens of a stretch of a document.")
    ] = DEFAULT_CONTEXT,
    threads: options.Threads = None,
    cache_mb: Annotated[
        str, typer.Option(metavar="SIZE", help="Expert cache in MiB, or as 4G.")
    ] = "auto",
) -> None:
    """Fit matrices that predict routings N layers early, for --route-ahead-gates.

    Every fifth document is held out: what is used, and whether it is better than the layer's own
    router, is decided on those. An interrupted calibration continues from OUT.partial.

    \b
    routeahead calibrate model.gguf --text a.txt --text b.txt --depth 2 --out gates.safetensors
    routeahead run model.gguf --route-ahead 2 --route-ahead-gates gates.safetensors -p "Hello"
    """
    path, texts = options.model_path(model), text or []
    if not texts:
        raise SettingsError("nothing to calibrate on: give --text, once for each document")
    partial = out.with_name(f"{out.name}.partial")
    shards = [("a file of the model", shard) for shard in shard_paths(path)]
    check_apart([*shards, *(("a text", one) for one in texts)], [out, partial])
    check_writable(out)
    options.announce(model)
    request = Request(
        path,
        texts,
        [options.whole_if_it_is(one) for one in depth or (2,)],
        layers=_layers(layers),
        context=context,
        max_tokens=max_tokens,
        threads=threads or default_threads(),
        settings={"cache_mb": options.cache_size(cache_mb)},
    )
    calibration = Calibration(request, partial)
    older = read_gates(out, calibration.model) if out.exists() else None
    found = _run(calibration)
    if older:
        found = Gates(found.model, older.gates | found.gates, found.fitted, found.held)
    write_gates(out, found)
    calibration.forget()
    terminal.note(f"{found.fitted} tokens fitted, {found.held} held out: written to {out}")
    if found.fitted < calibration.width:
        terminal.note(
            f"that is little: a vector has {calibration.width} numbers; give more text than that"
        )
    terminal.note("slots predicted right: by the layers' own routers / calibrated")
    _print(found)


def _run(calibration: Calibration) -> Gates:
    errors = console(stderr=True)
    with bars(errors) as show:
        try:
            return calibration.run(show)
        except KeyboardInterrupt:
            errors.print("interrupted: the same command continues from the last checkpoint, if any")
            raise typer.Exit(130) from None


def _print(gates: Gates) -> None:
    """Slots of held-out documents that the layers' own routers, and what was fitted, predict."""
    layers = sorted({layer for layer, _ in gates.gates})

    def cell(layer: int, depth: float) -> str:
        gate: Any = gates.gates.get((layer, depth))
        return f"{gate.stale:.1%} / {gate.agreement:.1%}" if gate else ""

    columns = [
        Column(f"{depth} early", [*(cell(layer, depth) for layer in layers), _mean(gates, depth)])
        for depth in gates.depths
    ]
    print_table("layer", [*map(str, layers), "all"], columns)


def _mean(gates: Gates, depth: float) -> str:
    found = list(gates.at(depth).values())
    stale = sum(gate.stale for gate in found) / len(found)
    return f"{stale:.1%} / {sum(gate.agreement for gate in found) / len(found):.1%}"


def _layers(text: str | None) -> range | None:
    if text is None:
        return None
    match = _RANGE.match(text)
    if not match:
        raise SettingsError(f"--layers {text}: give numbers such as 0-11, or one number")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise SettingsError(f"--layers {text}: the first is after the last")
    return range(first, last + 1)
