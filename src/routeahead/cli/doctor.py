"""`routeahead doctor`: whether a model runs here, and how fast, before it runs."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from routeahead.cli import options, terminal
from routeahead.cli.device import device_rows
from routeahead.cli.open_model import DEFAULT_CONTEXT
from routeahead.cli.terminal import print_facts, size
from routeahead.config import Settings
from routeahead.doctor.examination import MODELLED, Examination, examine
from routeahead.doctor.forecast import Band
from routeahead.doctor.hollow import hollow_copy
from routeahead.experts.layout import MIB
from routeahead.hub.reference import PREFIX, is_reference, parse
from routeahead.hub.store import locate
from routeahead.models import DEFAULT_MODEL


@functools.partial(options.with_settings, only=MODELLED)
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="GGUF file, or OWNER/REPO:QUANT on the hub, of which only headers are fetched.",
            show_default="the built-in model",
        ),
    ] = None,
    threads: options.Threads = None,
    context: options.Context = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: bytes, seconds, tokens a second.")
    ] = False,
    **settings: Any,
) -> None:
    """Say whether a model runs here, with which memory, and about how fast.

    Probes disk and processors for ten seconds. Exit status 1 if it does not run.

    \b
    routeahead doctor model.gguf
    routeahead doctor unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M --cache-mb 8G
    """
    start_s = time.time() - psutil.Process().create_time()
    name = model or str(DEFAULT_MODEL)
    with terminal.progress() as show, _opened(name) as (path, here):
        found = examine(
            path,
            Settings(**settings).validate(),
            threads=threads,
            context=context or DEFAULT_CONTEXT,
            start_s=start_s,
            here=here,
            say=lambda text: show(lambda: text),
        )
    if as_json:
        print(json.dumps({"model": name, **found.as_dict()}, indent=2))
    else:
        print_facts([("model", name), *_rows(found)])
    if not found.memory.fits:
        raise typer.Exit(1)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[tuple[Path, bool]]:
    """The file to examine, and whether it has the model's bytes."""
    if Path(name).exists() or not is_reference(name):
        yield Path(name), True
    elif pulled := locate(parse(name)):
        yield pulled, True
    elif name.startswith(PREFIX) or ":" in name:
        with hollow_copy(parse(name)) as path:
            yield path, False
    else:
        options.check_path(Path(name))
        yield Path(name), True


def _rows(found: Examination) -> list[tuple[str, str]]:
    layout, memory, disk = found.layout, found.memory, found.disk
    top_k = layout.n_expert_used
    made = f"{len(layout.moe_layers)} layers of {layout.n_expert} experts, top-{top_k}"
    rows = [
        ("", f"{layout.arch}: {made}, {size(layout.file_bytes)}"),
        ("runs here", _verdict(found)),
        *_memory_rows(found),
        ("disk", f"{disk.bandwidth / MIB:,.0f} MiB/s, reads of {size(disk.slice_bytes)}, "
         f"{disk.latency_s * 1e3:.1f} ms before each"
         f"{'' if disk.direct else '; through the page cache, which flatters it'}"),
    ]  # fmt: skip
    engine, routed, told = found.engine, found.traffic, found.forecast
    if not (engine and routed and told):
        if memory.fits:
            rows.append(("speed", "not forecast: there is no device here to measure it on"))
        return rows
    need = f"{size(memory.least)} of experts a token"
    note = "; faster without the probe's stop after each router" if found.device else ""
    return [
        *rows,
        ("compute", f"{engine.hot_s * 1e3:,.1f} ms a token that misses nothing; "
         f"{engine.threads} thread{'s' if engine.threads > 1 else ''}"),
        ("routing", f"{routed.hit_rate:.0%} of {need} in the cache, if it routes like "
         f"{routed.text}"),
        ("decode", f"{_band(told.decode, 1)} tok/s; {told.token_s * 1e3:,.0f} ms a token, of which "
         f"it waits {told.stall_s * 1e3:,.0f}{note}"),
        ("prompt", f"{_band(told.prompt, 1)} tok/s, 512 tokens"),
        ("first token", f"{_band(told.cold_start_s, 1)} s after the start, for 16 tokens"),
    ]  # fmt: skip


def _memory_rows(found: Examination) -> list[tuple[str, str]]:
    memory = found.memory
    parts = [
        ("memory, free", size(memory.free)),
        ("  dense weights", size(memory.dense)),
        ("  a prompt's layer", size(memory.prompt)),
        ("  process", size(memory.process)),
    ]
    if not (found.engine or found.device):
        return parts
    parts.insert(2, ("  KV cache", f"{size(memory.kv)} for {memory.context:,} tokens (-c)"))
    if found.engine:
        parts.insert(3, ("  compute buffers", size(memory.compute)))
    cache = f"{size(memory.cache)}: {memory.share:.0%} of the experts"
    parts += [("  expert cache", cache if memory.cache else "none")]
    if memory.context_room is not None:
        parts.append(("context that fits", f"{memory.context_room:,} tokens, with the smallest "
                      "useful cache"))  # fmt: skip
    return [*parts, *device_rows(found.device)]


def _verdict(found: Examination) -> str:
    memory = found.memory
    if not memory.fits:
        return "no: not even the dense weights and one layer of experts have room"
    if memory.share >= 1:
        return "yes: everything has room"
    if memory.cache:
        return f"yes, with {size(memory.cache)} for experts"
    return "yes, with --cache-mb 0: there is no room for what one token routes to"


def _band(band: Band, decimals: int) -> str:
    value, low, high = (f"{x:,.{decimals}f}" for x in (band.value, band.low, band.high))
    return f"{value} ({low} to {high})"
