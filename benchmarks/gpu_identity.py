"""Whether streaming with dense layers on a device gives the logits of plain llama.cpp, bit for bit.

    benchmarks/gpu_identity.py MODEL [-ngl N|all] [-n TOKENS]

The reference is `llama_cpp.Llama` with as many layers on the device, its experts in mapped memory
(llama.cpp's `--cpu-moe`) and no callback, in a process of its own. Both are fed the same random
tokens, a prompt and then one by one. Exit status 1 if a logit differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp  # first: see `plain_mmap`
import numpy as np
import plain_mmap

from routeahead import Llama

PROMPT, CONTEXT = 64, 512


def main() -> None:
    arguments = parse()
    if arguments.reference:
        plain = argparse.Namespace(**vars(arguments), c=CONTEXT, t=arguments.threads)
        np.save(arguments.reference, evaluate(plain_mmap.load(plain), arguments.n))
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "reference.npy"
        subprocess.run([sys.executable, *sys.argv, "--reference", str(kept)], check=True)
        expected = np.load(kept)
    failed = False
    for cache in (0, arguments.cache_mb):
        llm = Llama(
            arguments.model,
            n_ctx=CONTEXT,
            n_threads=arguments.threads,
            n_gpu_layers=arguments.ngl,
            cache_mb=cache,
            force_cache=cache != 0,
        )
        found, reads = evaluate(llm, arguments.n), llm.counters.decode.reads
        where = llm.offload.describe()
        llm.close()
        same = np.array_equal(found, expected)
        failed |= not same
        verdict = (
            "identical" if same else f"DIFFERENT by up to {np.abs(found - expected).max():.3g}"
        )
        print(f"{where}, cache {cache} MiB, {reads} reads while decoding: {verdict}")
    sys.exit(failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("-ngl", type=plain_mmap.layers, default=-1, metavar="N|all")
    parser.add_argument("-n", type=int, default=32, help="tokens to decode")
    parser.add_argument("-t", "--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--cache-mb", type=int, default=256, help="of the second run, in MiB")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def evaluate(llm: Any, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits (1 + count, vocabulary) after a prompt, and after each of `count` tokens."""
    rng = random.Random(1)
    tokens = [rng.randrange(llm.n_vocab()) for _ in range(PROMPT + count)]
    rows = []
    for batch in (tokens[:PROMPT], *([token] for token in tokens[PROMPT:])):
        llm.eval(batch)
        pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        rows.append(np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy())
    return np.stack(rows)


if __name__ == "__main__":
    main()
