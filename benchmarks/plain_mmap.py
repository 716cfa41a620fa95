"""Plain llama.cpp, its file mapped into memory: what a bench compares streaming with.

    routeahead bench MODEL --cell 'mmap: benchmarks/plain_mmap.py' --cell 'stream:'

`llama_cpp.Llama` with its defaults but one: use_extra_bufts is off. With it, llama.cpp crashes on
processors with AMX if a batch has two rows or more (llama.cpp issue 20824), and it copies weights
into another layout, so that they would not be mapped.

With `-ngl N`, that many layers go to a device and all experts stay in mapped memory, as with
llama.cpp's `--cpu-moe`: `benchmarks/gpu.sh`.

The report has those keys of `routeahead run --report` that apply. The disk is waited for in page
faults inside the arithmetic, so neither stall nor compute can be told apart. Bytes read are the
kernel's count for this process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Must stay the first import: routeahead sets OpenMP's variables when it is imported, and plain
# llama.cpp has to load without them.
import llama_cpp

from routeahead.cli.open_model import DEFAULT_CONTEXT
from routeahead.cli.options import forced_tokens
from routeahead.engine.offload import EXPERTS
from routeahead.llamacpp.placement import ExpertsInRam
from routeahead.machine.cpus import default_threads
from routeahead.telemetry.counters import cpu_s, peak_rss_bytes

COUNTED = ("wall_s", "cpu_s", "bytes_read")


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    llm = load(arguments)
    load_s = time.perf_counter() - started
    tokens = forced_tokens(arguments.forced_tokens, arguments.n, llm.n_vocab())
    start = time.perf_counter()
    llm.eval(llm.tokenize(b"", add_bos=True, special=True) or tokens[:1])
    first_token_s = time.perf_counter() - start
    steps = [decode(llm, token) for token in tokens]
    columns = {name: [step[index] for step in steps] for index, name in enumerate(COUNTED)}
    per_token = {name: sum(values) / len(values) for name, values in columns.items()}
    report = {
        "settings": {"program": "plain_mmap", "n_ctx": llm.n_ctx(), "threads": llm.n_threads},
        "tokens": tokens,
        "decode_steps": columns,
        "counters": {
            "load_s": load_s,
            "first_token_s": first_token_s,
            "s_per_token": per_token["wall_s"],
            "cpu_s_per_token": per_token["cpu_s"],
            "bytes_per_token": per_token["bytes_read"],
            "peak_rss_bytes": peak_rss_bytes(),
        },
    }
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--forced-tokens", required=True, metavar="FILE|seed:N")
    parser.add_argument("-n", type=int, required=True, help="tokens to decode")
    parser.add_argument("-t", type=int, default=default_threads(), help="compute threads")
    parser.add_argument("-c", type=int, default=DEFAULT_CONTEXT, help="context in tokens")
    parser.add_argument("-ngl", type=layers, default=0, metavar="N|all", help="layers on a device")
    parser.add_argument("--report", type=Path, required=True, help="where to write the figures")
    return parser.parse_args(argv)


def layers(text: str) -> int:
    return -1 if text == "all" else int(text)


def load(arguments: argparse.Namespace) -> llama_cpp.Llama:
    default_params = llama_cpp.llama_cpp.llama_model_default_params
    in_ram = ExpertsInRam(EXPERTS)

    def without_repacking() -> Any:
        params = default_params()
        params.use_extra_bufts = False
        if arguments.ngl:
            in_ram.inject(params)
        return params

    llama_cpp.llama_cpp.llama_model_default_params = without_repacking
    return llama_cpp.Llama(
        str(arguments.model),
        n_ctx=arguments.c,
        n_threads=arguments.t,
        n_threads_batch=arguments.t,
        use_mmap=True,
        n_gpu_layers=arguments.ngl,
        op_offload=False,
        verbose=False,
    )


def decode(llm: llama_cpp.Llama, token: int) -> tuple[float, float, int]:
    """Evaluates one token; its wall time, CPU time (seconds) and bytes read from disk."""
    before = reading()
    llm.eval([token])
    wall, cpu, read = (now - then for now, then in zip(reading(), before, strict=True))
    return wall, cpu, int(read)


def reading() -> tuple[float, float, int]:
    """Running totals of COUNTED."""
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    return time.perf_counter(), cpu_s(), blocks * 512


if __name__ == "__main__":
    main()
