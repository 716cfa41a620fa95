"""`routeahead tune`: finds settings for a model on this machine, once, and keeps them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from routeahead.bench.runs import Plan
from routeahead.bench.summary import SPEED, figures
from routeahead.bench.tuning import Choice, Knob, Tuning
from routeahead.cli import options
from routeahead.cli.config_file import SPIN, read_config, write_values
from routeahead.cli.terminal import Column, print_table, visible
from routeahead.config import Settings
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads, usable_cores
from routeahead.machine.memory import available_bytes
from routeahead.models import DEFAULT_MODEL

_LANES = (1, 4, 8)
_SPINS = (1000, 1000000)


def tune(
    model: options.Model = None,
    passes: Annotated[int, typer.Option(min=1, help="Runs of each value.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Decoded tokens that count.")] = 16,
    warmup: Annotated[int, typer.Option(min=0, help="Decoded tokens before them.")] = 8,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; say what would be written.")
    ] = False,
) -> None:
    """Find threads, lanes, OpenMP's spin count and the cache's size for a model, by short runs.

    Takes some minutes, in which nothing else should run. The values go to config.toml, which all
    verbs read: the model's section has what was found for it, [defaults] the spin count.
    """
    read_config()  # what is wrong with it is said before minutes have passed
    path = options.model_path(model)
    name = str(model or DEFAULT_MODEL)
    layout = read_layout(path).loaded()
    options.announce(model)
    plan = Plan(passes=passes, tokens=tokens, warmup=warmup)
    tuning = Tuning(layout, knobs(layout), plan)
    for number, (knob, run) in enumerate(tuning, 1):
        outcome = run.error or f"{figures(run.report, warmup)[SPEED]:.2f} tok/s"
        print(visible(f"[{number}/{len(tuning)}] {knob.name} {run.cell}: {outcome}"),
              file=sys.stderr, flush=True)  # fmt: skip
    _show(tuning.choices)
    found = {one.knob.name: one.value for one in tuning.choices}
    spin = found.pop(SPIN, None)
    if dry_run:
        print("nothing was written")
        return
    written = write_values(name, found, spin if isinstance(spin, int) else None)
    print(f"written to {written}")


def knobs(layout: ModelLayout) -> list[Knob]:
    """What there is to tune of a model here."""
    cores = max(1, int(usable_cores()))
    threads = default_threads()
    counts = sorted({1, cores // 2, cores - 1, cores, threads} - {0})
    found = [
        Knob("threads", "-t", threads, [n for n in counts if n != threads]),
        Knob("io_threads", "--io-threads", Settings.io_threads, _LANES),
        Knob(SPIN, "GOMP_SPINCOUNT=", int(os.environ["GOMP_SPINCOUNT"]), _SPINS),
    ]
    room = available_bytes() - layout.dense_bytes
    half = min(room, layout.expert_bytes) // 2 // MIB
    if room < layout.expert_bytes and half * MIB > layout.token_bytes():
        found.append(Knob("cache_mb", "--cache-mb", "auto", [half]))
    return found


def _show(choices: list[Choice]) -> None:
    for number, one in enumerate(choices):
        if number:
            print()
        values = list(one.speeds)
        shown = [f"{value}" for value in values]
        columns = [
            Column("tok/s", [f"{one.speeds[value]:.2f}" for value in values]),
            Column("", ["taken" if value == one.value else "" for value in values], left=True),
        ]
        print_table(one.knob.name, shown, columns)
