"""What streaming costs against the bounds that the disk and the memory set.

    python benchmarks/make_model.py MODEL --layers 12
    python benchmarks/stream_bounds.py MODEL

* No cache: a token may take its compute time and 1.1 times what `preadv` alone takes for the same
  reads, in as many threads as there are lanes, into reused committed buffers.
* Cold: the time to the first token against the bytes that it needs.
* Memory: the peak against everything that must be resident.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cli_json import cli_json

from routeahead.bench.machine_state import drop_page_cache
from routeahead.engine.window import WINDOW
from routeahead.experts.arena import Reservation
from routeahead.experts.layout import BLOCK, MIB, ModelLayout
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.telemetry.io_trace import read_io_trace

SLACK_MIB = 300
COLD_SLACK_S = 2.0
BARE_FACTOR = 1.1
BUFFERS = 32  # reused in turn


def run(model: Path, *flags: object) -> dict[str, Any]:
    """The report of one run of random tokens, and `process_s`, the wall time of its process."""
    start = time.perf_counter()
    report = cli_json("run", model, "--forced-tokens", "seed:5", *flags)
    return {**report, "process_s": time.perf_counter() - start}


def bare_s(layout: ModelLayout, reads: list[tuple[int, int, int]], lanes: int, huge: bool) -> float:
    """Seconds that `lanes` threads take for `reads` (shard, offset, length) with `preadv` alone."""
    descriptors = [os.open(s.path, os.O_RDONLY | os.O_DIRECT) for s in layout.shards]
    size = max(length for _, _, length in reads)
    memory = Reservation(size * BUFFERS, huge=huge)
    for offset in range(0, size * BUFFERS, BLOCK):
        memory.view[offset] = 1
    queue, lock = iter(enumerate(reads)), threading.Lock()

    def lane() -> None:
        while True:
            with lock:
                job = next(queue, None)
            if job is None:
                return
            index, (shard, offset, length) = job
            start = index % BUFFERS * size
            os.preadv(descriptors[shard], [memory.view[start : start + length]], offset)

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    for descriptor in descriptors:
        os.close(descriptor)
    return took


def no_cache(layout: ModelLayout, model: Path, options: Any) -> None:
    """Interleaved: resident, no cache, bare reads of the same offsets."""
    figures: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        resident = run(model, "-n", options.tokens, "--resident")
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "io.csv"
            streamed = run(
                model, "-n", options.tokens, "--cache-mb", 0, "--io-trace", trace,
                "--io-threads", options.lanes,
            )  # fmt: skip
            columns = read_io_trace(trace)
        decoded = columns["phase"] == "decode"
        reads = list(zip(*(columns[c][decoded].tolist() for c in ("shard", "offset", "bytes")),
                         strict=True))  # fmt: skip
        reads = [(s, o, -(-n // BLOCK) * BLOCK) for s, o, n in reads]
        small, huge = (
            bare_s(layout, reads, options.lanes, kind) / options.tokens for kind in (False, True)
        )
        compute = resident["counters"]["s_per_token"]
        token = streamed["counters"]["s_per_token"]
        for name, value in {
            "resident": compute,
            "no cache": token,
            "bare 4 KiB": small,
            "bare huge": huge,
            "bound": compute + BARE_FACTOR * small,
            "of bound": token / (compute + BARE_FACTOR * small),
            "of bound, huge": token / (compute + BARE_FACTOR * huge),
            "MiB": streamed["counters"]["bytes_per_token"] / MIB,
        }.items():
            figures.setdefault(name, []).append(value)
    print(f"no cache, {options.lanes} lanes, {options.rounds} rounds (median, min..max):")
    for name, values in figures.items():
        scale = 1 if name == "MiB" or name.startswith("of bound") else 1e3
        low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
        unit = " ms" if scale == 1e3 else ""
        print(f"  {name:15} {middle:8.2f}{unit} ({low:.2f}..{high:.2f})")


def cold(layout: ModelLayout, model: Path, options: Any) -> None:
    """A 16-token prompt with nothing in the page cache; wall time of the whole process."""
    excess = []
    for _ in range(options.rounds):
        drop_page_cache(layout.shards)
        found = run(model, "-p", "p" * 15, "--raw", "-n", 1, "--cache-mb", options.cache_mb)
        counters = found["counters"]
        drop_page_cache(layout.shards)
        union = counters["bytes_read"] - counters["bytes_per_token"]
        pieces = random_pieces(layout, int(union + layout.dense_bytes))
        read_s = bare_s(layout, pieces, options.lanes, False)
        compute = counters["prefill_compute_s"]
        excess.append(found["process_s"] - read_s - compute)
        print(
            f"cold: {found['process_s']:.2f} s for the process, load {counters['load_s']:.2f}, "
            f"first token {counters['first_token_s']:.2f}; bare reads of "
            f"{(union + layout.dense_bytes) / MIB:.0f} MiB {read_s:.2f}, prefill compute "
            f"{compute:.2f}; excess {excess[-1]:.2f} s (allowed {COLD_SLACK_S})"
        )


def random_pieces(layout: ModelLayout, nbytes: int) -> list[tuple[int, int, int]]:
    """As many 1 MiB reads as make up `nbytes`, spread over the first file."""
    count = -(-nbytes // MIB)
    step = max(1, (layout.shards[0].size // MIB - 1) // count)
    return [(0, index * step * MIB, MIB) for index in range(count)]


_COMPUTE_BUFFER = re.compile(r"compute buffer size =\s*([\d.]+) MiB")
_KV_BUFFER = re.compile(r"KV buffer size =\s*([\d.]+) MiB")


def memory(layout: ModelLayout, model: Path, options: Any) -> None:
    """Peak resident size against what the engine has to hold."""
    found = run(
        model, "-p", "p" * 200, "--raw", "-n", options.tokens, "--cache-mb", options.cache_mb
    )
    script = (
        "import sys, routeahead; "
        "routeahead.Llama(sys.argv[1], n_ctx=int(sys.argv[2]), cache_mb=0, verbose=True)"
    )
    context = found["settings"]["n_ctx"]
    log = subprocess.run(
        [sys.executable, "-c", script, str(model), str(context)],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    parts = {
        "dense": layout.dense_bytes / MIB,
        "KV": sum(map(float, _KV_BUFFER.findall(log))),
        "compute buffers": sum(map(float, _COMPUTE_BUFFER.findall(log))),
        "cache": options.cache_mb,
        "one layer": layout.layer_bytes() / MIB,
        "read ahead": min(layout.layer_bytes(), WINDOW) / MIB,
        "slack": SLACK_MIB,
    }
    peak, bound = found["counters"]["peak_rss_bytes"] / MIB, sum(parts.values())
    print(f"peak {peak:.0f} MiB of {bound:.0f}: {peak / bound:.1%}")
    print("  " + ", ".join(f"{name} {size:.0f}" for name, size in parts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--cache-mb", type=int, default=1300)
    parser.add_argument("--only", choices=["no_cache", "cold", "memory"])
    options = parser.parse_args()
    layout = read_layout(options.model)
    for part in (no_cache, cold, memory):
        if options.only in (None, part.__name__):
            part(layout, options.model, options)


if __name__ == "__main__":
    main()
