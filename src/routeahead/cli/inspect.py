"""`routeahead inspect`: what a model is made of, and what it needs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from routeahead.cli import options
from routeahead.cli.device import device_rows
from routeahead.cli.open_model import DEFAULT_CONTEXT
from routeahead.cli.terminal import print_facts, size
from routeahead.doctor.device import OnDevice, expected, offload_here, on_device
from routeahead.engine.offload import Offload
from routeahead.errors import ModelError
from routeahead.experts.layout import ModelLayout
from routeahead.llamacpp.devices import Device
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.memory import available_bytes


def inspect(
    model: options.Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
    gpu_layers: Annotated[
        str,
        typer.Option(
            "-ngl",
            "--gpu-layers",
            metavar="N|auto|all",
            help="Say what would go to a device; 'auto' asks what fits there.",
        ),
    ] = "0",
    context: options.Context = None,
) -> None:
    """Print a model's layers, experts and sizes, and how much of it fits in this machine.

    \b
    routeahead inspect model.gguf
    routeahead inspect model-00001-of-00004.gguf --json
    routeahead inspect model.gguf -ngl auto -c 8192
    """
    path = options.model_path(model)
    layout, free = read_layout(path).loaded(), available_bytes()
    if not layout.experts:
        raise ModelError(
            f"{path}: has no experts ({layout.arch}): nothing to stream; "
            "`routeahead run --resident` runs it"
        )
    tokens = context or min(DEFAULT_CONTEXT, int(layout.value("context_length") or 0))
    offload, found = offload_here(layout, options.gpu_layers(gpu_layers), tokens)
    if as_json:
        print(json.dumps(report(layout, free, offload, found), indent=2))
        return
    there = on_device(layout, offload, found, expected(layout, offload, tokens))
    rows = facts(layout, free, there)
    if model is None:
        rows.insert(0, ("", "no model given: this is the built-in one"))
    print_facts(rows)


def report(
    layout: ModelLayout, free: int, offload: Offload, found: Sequence[Device]
) -> dict[str, Any]:
    """What `--json` prints; `free` is what this machine has left. All sizes in bytes."""
    return {
        "files": [str(shard.path) for shard in layout.shards],
        "arch": layout.arch,
        "packed": layout.packed,
        "file_bytes": layout.file_bytes,
        "moe_layers": layout.moe_layers,
        "experts": layout.n_expert,
        "top_k": layout.n_expert_used,
        "expert_bytes_by_layer": layout.bytes_by_layer(),
        "quantisation": {p: dict(kinds) for p, kinds in _kinds(layout).items()},
        "expert_bytes": layout.expert_bytes,
        "dense_bytes": layout.dense_bytes,
        "token_bytes": layout.token_bytes(),
        "free_bytes": free,
        "fits": _fit(layout, free, offload),
        "device": offload.as_dict(layout, found),
    }


def facts(layout: ModelLayout, free: int, there: OnDevice) -> list[tuple[str, str]]:
    """(label, value) rows; `free` in bytes is what this machine has left."""
    sizes = layout.bytes_by_layer()
    least = layout.token_bytes()
    rows = [
        ("model", f"{layout.shards[0].path} ({layout.arch}, {_files(layout)})"),
        ("file", size(layout.file_bytes)),
        ("MoE layers", f"{len(sizes)}: {_ranges(layout.moe_layers)}"),
        ("experts", f"{layout.n_expert} a layer, top-{_top_k(layout)}"),
        ("an expert", " or ".join(size(n) for n in sorted(set(sizes.values())))),
        *_quantisation(layout),
        ("experts, all", size(layout.expert_bytes)),
        ("dense weights", f"{size(there.offload.host_bytes(layout))} (kept in memory)"),
        ("a token touches", f"{size(least)} of experts: the smallest sensible cache"),
        ("free memory", size(free)),
        ("fits here", _fit(layout, free, there.offload)),
    ]
    return rows + (device_rows(there) if there.offload.layers else [])


def _files(layout: ModelLayout) -> str:
    return "packed" if layout.packed else f"{len(layout.shards)} file(s)"


def _quantisation(layout: ModelLayout) -> list[tuple[str, str]]:
    return [
        (f"  {name}", ", ".join(f"{quant} in {count} layers" for quant, count in kinds.items()))
        for name, kinds in _kinds(layout).items()
    ]


def _kinds(layout: ModelLayout) -> dict[str, dict[str, int]]:
    """Projection → quantisation → layers that have it, the commonest first."""
    found = {}
    for projection in dict.fromkeys(e.projection for e in layout.experts):
        kinds = Counter(e.quant for e in layout.experts if e.projection == projection)
        found[projection] = dict(kinds.most_common())
    return found


def _fit(layout: ModelLayout, free: int, offload: Offload) -> str:
    left = free - offload.host_bytes(layout) - layout.layer_bytes()
    if left >= layout.expert_bytes:
        return "everything: all experts fit in the cache"
    if left >= layout.token_bytes():
        share = left / layout.expert_bytes
        return f"dense weights and a cache of {size(left)} ({share:.0%} of the experts)"
    if left > 0:
        return "dense weights, but no useful cache: run with --cache-mb 0"
    return "not even the dense weights: --dense mmap may still run, slowly"


def _top_k(layout: ModelLayout) -> str:
    numbers = sorted(set(map(layout.top_k, layout.moe_layers)))
    return " or ".join(map(str, numbers))


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] → '1-3, 7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
