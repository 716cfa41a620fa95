"""`routeahead inspect`: what a model is made of, and what it needs."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from routeahead.cli import options
from routeahead.errors import ModelError
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.memory import available_bytes
from routeahead.models import DEFAULT_MODEL


def inspect(model: options.Model = DEFAULT_MODEL) -> None:
    """Print a model's layers, experts and sizes, and how much of it fits in this machine."""
    layout = read_layout(model).loaded()
    if not layout.experts:
        raise ModelError(
            f"{model}: has no experts ({layout.arch}): nothing to stream; "
            "`routeahead run --resident` runs it"
        )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts(layout, available_bytes()):
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)


def facts(layout: ModelLayout, free: int) -> list[tuple[str, str]]:
    """(label, value) rows; `free` in bytes is what this machine has left."""
    sizes = layout.bytes_by_layer()
    least = layout.token_bytes()
    rows = [
        ("model", f"{layout.shards[0].path} ({layout.arch}, {len(layout.shards)} file(s))"),
        ("file", _mib(layout.file_bytes)),
        ("MoE layers", f"{len(sizes)}: {_ranges(layout.moe_layers)}"),
        ("experts", f"{layout.n_expert} a layer, top-{_top_k(layout)}"),
        ("an expert", " or ".join(_mib(n) for n in sorted(set(sizes.values())))),
        *_quantisation(layout),
        ("experts, all", _mib(layout.expert_bytes)),
        ("dense weights", f"{_mib(layout.dense_bytes)} (kept in memory)"),
        ("a token touches", f"{_mib(least)} of experts: the smallest sensible cache"),
        ("free memory", _mib(free)),
        ("fits here", _fit(layout, free)),
    ]
    return rows


def _quantisation(layout: ModelLayout) -> list[tuple[str, str]]:
    rows = []
    for projection in dict.fromkeys(e.projection for e in layout.experts):
        kinds = Counter(e.quant for e in layout.experts if e.projection == projection)
        text = ", ".join(f"{quant} in {count} layers" for quant, count in kinds.most_common())
        rows.append((f"  {projection}", text))
    return rows


def _fit(layout: ModelLayout, free: int) -> str:
    left = free - layout.dense_bytes - layout.layer_bytes()
    if left >= layout.expert_bytes:
        return "everything: all experts fit in the cache"
    if left >= layout.token_bytes():
        share = left / layout.expert_bytes
        return f"dense weights and a cache of {_mib(left)} ({share:.0%} of the experts)"
    if left > 0:
        return "dense weights, but no useful cache: run with --cache-mb 0"
    return "not even the dense weights: --dense mmap may still run, slowly"


def _top_k(layout: ModelLayout) -> str:
    numbers = sorted(set(map(layout.top_k, layout.moe_layers)))
    return " or ".join(map(str, numbers))


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB"


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] → '1-3, 7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
