"""What one read of an expert would bring, against one for each of its three projections.

    python benchmarks/make_model.py MODEL --layers 12
    python benchmarks/pack.py MODEL --json pack.json

In a GGUF, the projections of an expert lie in three tensors, far apart; a file could be rewritten
with them side by side. Here the engine's own lanes read random experts of random layers both ways,
top-8 of 128, from a file that is as large as a model, until the last byte has arrived. What is in
the file does not matter. (In a run, a layer begins to compute when its first projection is there,
which an expert in one piece cannot: what is measured is the most that it could bring.)

Both ways take turns, and each pass reads the same experts both ways. `--json` is written after each
pass.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from pathlib import Path
from typing import Any

from routeahead.bench.statistics import paired_ratio
from routeahead.experts.layout import MIB, ModelLayout, Shard, TensorInfo
from routeahead.experts.reader import FileReader, Reader, Throttled
from routeahead.experts.slots import Slots
from routeahead.experts.source import ExpertSource
from routeahead.telemetry.json_file import write_json

EXPERTS, TOP_K, LAYERS = 128, 8, 64
WAYS = {"apart": ("gate", "up", "down"), "together": ("gate_up",)}
UNALIGNED = 32  # GGUF's own alignment: a tensor seldom begins where a block does
WARMUP = 3  # layers, before the clock starts: memory that is touched for the first time is slow
ENOUGH, MOST = 128 * MIB, 200  # bytes of a measurement, and layers at most


def layout(file: Path, way: str, slice_bytes: int) -> ModelLayout:
    """Layers spread over a file, an expert's projections in tensors of their own or in one."""
    size, of_layer = file.stat().st_size, 3 * EXPERTS * slice_bytes
    layers = min(LAYERS, size // (of_layer + UNALIGNED))
    if layers < 1:
        raise SystemExit(f"{file}: give a file of {of_layer // MIB + 1} MiB or more")
    step, nbytes = size // layers // UNALIGNED * UNALIGNED, of_layer // len(WAYS[way])
    tensors = [
        TensorInfo(
            f"blk.{layer}.ffn_{name}_exps.weight", "Q4_K", (1, 1, EXPERTS), 0,
            layer * step + place * nbytes + UNALIGNED, nbytes,
        )
        for layer in range(layers)
        for place, name in enumerate(WAYS[way])
    ]  # fmt: skip
    facts = {"general.architecture": "any", "any.expert_used_count": TOP_K}
    return ModelLayout([Shard(file, size)], tensors, facts)


def measure(file: Path, way: str, cell: dict[str, Any], seed: int) -> tuple[float, float]:
    """Milliseconds that a layer's experts take to arrive, and of CPU time, on average."""
    slice_bytes, rng = cell["kib"] << 10, random.Random(seed)
    model = layout(file, way, slice_bytes)
    reader: Reader = FileReader(model.shards)
    if not reader.direct:
        raise SystemExit(f"{file}: is not read past the page cache: {reader.fallback}")
    if cell["throttle"]:
        reader = Throttled(reader, bytes_per_s=cell["throttle"] * MIB, latency_s=0)
    source = ExpertSource(
        model, Slots(model.experts), reader,
        lanes=cell["lanes"], bind=lambda *_: None, cache_policy="lru",
    )  # fmt: skip
    rounds = min(MOST, max(10, ENOUGH // (3 * TOP_K * slice_bytes)))
    began = worked = 0.0
    try:
        source.begin()
        for number in range(WARMUP + rounds):
            if number == WARMUP:
                began, worked = time.perf_counter(), time.process_time()
            layer, experts = rng.choice(model.moe_layers), rng.sample(range(EXPERTS), TOP_K)
            load = source.require(layer, experts)
            if load:
                source.wait(load)
        took, worked = time.perf_counter() - began, time.process_time() - worked
    finally:
        source.close()
        reader.close()
    return 1e3 * took / rounds, 1e3 * worked / rounds


def show(cell: dict[str, Any]) -> None:
    apart, together = (cell["ms"][way] for way in WAYS)
    ratio = paired_ratio(apart, together)
    known = ratio.low is not None and ratio.high is not None
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}, " if known else ""
    print(
        f"3 x {cell['kib']:4} KiB, {cell['lanes']} lanes, {cell['throttle'] or 'no'} MiB/s: "
        f"apart / together {ratio.median:.2f} ({interval}{ratio.pairs} pairs), "
        f"{sorted(together)[len(together) // 2]:.2f} ms a layer together",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a model, or any large file on its disk")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--kib", type=int, nargs="+", default=[864, 300, 100, 18])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--throttle", type=int, nargs="+", default=[0, 600, 1200], help="MiB/s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells: list[dict[str, Any]] = [
        {
            "kib": kib, "lanes": lanes, "throttle": throttle,
            "ms": {way: [] for way in WAYS}, "cpu_ms": {way: [] for way in WAYS},
        }
        for throttle, kib, lanes in itertools.product(options.throttle, options.kib, options.lanes)
    ]  # fmt: skip
    for number in range(options.passes):
        for cell in cells:
            for way in WAYS if number % 2 else reversed(WAYS):
                took, worked = measure(options.file, way, cell, number)
                cell["ms"][way].append(took)
                cell["cpu_ms"][way].append(worked)
        if options.json:
            write_json(options.json, cells)
    for cell in cells:
        show(cell)


if __name__ == "__main__":
    main()
