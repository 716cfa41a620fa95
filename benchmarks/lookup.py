"""What guessed tokens cost and bring: bytes and time a token, with and without, in turn.

    python benchmarks/lookup.py [MODEL] [--passes 3] [--throttle 300] [--json FILE]

Two edits, of a page of prose in which one word is replaced and of a program in which one name is.
The prompt has the old text, and the model is made to write the new one (a logits processor forces
each token), as a model would that can edit; routing, reads and drafts are what they are for that
text. Then, unforced, the greedy answers to the battery's questions: how many are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import LogitsProcessorList

from routeahead import Llama
from routeahead.experts.layout import MIB
from routeahead.models import DEFAULT_MODEL
from routeahead.telemetry.json_file import write_json

DATA = Path(__file__).parent / "data"
PROGRAM = Path(__file__).parent / "data" / "edit.py.txt"
SHARES = (0.0, 0.25, 0.5)  # of the experts in the cache
LOOKUPS = (0, 4, 8, 16)


def edits() -> dict[str, tuple[str, str]]:
    """Name → the text, and what it becomes."""
    prose = (DATA / "held-out.txt").read_text(encoding="utf-8")[:1200]
    program = PROGRAM.read_text(encoding="utf-8")
    return {
        "prose": (prose, prose.replace("the", "a")),
        "program": (program, program.replace("depth", "length")),
    }


def write(llm: Llama, old: str, new: str) -> dict[str, float]:
    """Has the new text written; figures a token."""
    prompt = llm.tokenize(f"Edit this text:\n{old}\nEdited:\n".encode(), special=True)
    wanted = llm.tokenize(new.encode(), add_bos=False)

    def force(input_ids: Any, scores: Any) -> Any:
        at = len(input_ids) - len(prompt)
        return np.where(np.arange(len(scores)) == wanted[min(at, len(wanted) - 1)], 0, -1e9)

    llm.reset()
    written: list[int] = []
    for token in llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([force])):
        if not written:  # the prompt's
            start = time.perf_counter()
            before = dict(vars(llm.counters.decode))
        written.append(token)
        if len(written) == len(wanted):
            break
    assert written == wanted
    decode = {name: value - before[name] for name, value in vars(llm.counters.decode).items()}
    tokens = len(wanted) - 1
    return {
        "tokens": tokens,
        "batches": decode["batches"],
        "drafted": decode["drafted"],
        "accepted": decode["accepted"],
        "mib": decode["bytes_read"] / MIB / tokens,
        "ms": 1e3 * (time.perf_counter() - start) / tokens,
    }


def same_answers(model: Path, lookup: int, limit: int) -> tuple[int, int]:
    """How many greedy answers of 24 tokens are those of plain decoding, and of how many."""
    questions = [
        json.loads(line)["prompt"]
        for line in (DATA / "battery.jsonl").read_text(encoding="utf-8").splitlines()
    ][:: max(1, 400 // limit)]
    answers = []
    for drafts in (0, lookup):
        llm = Llama(model, n_ctx=512, cache_mb=8, n_threads=1, lookup=drafts)
        asked = (llm(question, max_tokens=24, temperature=0) for question in questions)
        answers.append([answer["choices"][0]["text"] for answer in asked])
        llm.close()
    return sum(one == other for one, other in zip(*answers, strict=True)), len(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--throttle", type=float, default=0.0, help="MiB/s that reads may take.")
    parser.add_argument("--policy", default="lru", help="--cache-policy of the cells.")
    parser.add_argument("--answers", type=int, default=400, help="Questions; 0 for none.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for share in SHARES:
        models = {}
        for lookup in LOOKUPS:
            llm = Llama(
                options.model,
                n_ctx=1024,
                n_threads=1,
                cache_mb=1 if share else 0,
                force_cache=bool(share),
                cache_policy=options.policy,
                throttle=options.throttle,
                lookup=lookup,
            )
            assert llm.source
            llm.source.cache.budget = int(share * llm.layout.expert_bytes)
            models[lookup] = llm
        for name, (old, new) in edits().items():
            runs: dict[int, list[dict[str, float]]] = {lookup: [] for lookup in LOOKUPS}
            for index in range(options.passes + 1):  # the first fills the cache
                order = LOOKUPS if index % 2 else LOOKUPS[::-1]
                for lookup in order:
                    runs[lookup].append(write(models[lookup], old, new))
            for lookup, passes in runs.items():
                cells, plain = passes[1:], runs[0][1:]
                ratios = [b["ms"] / a["ms"] for a, b in zip(cells, plain, strict=True)]
                mib = statistics.median(cell["mib"] for cell in cells)
                line = {
                    "edit": name, "share": share, "lookup": lookup, **cells[-1], "mib": mib,
                    "ms": statistics.median(cell["ms"] for cell in cells),
                    "speed": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
                }  # fmt: skip
                found.append(line)
                print(
                    f"{name:8} cache {share:4.0%} --lookup {lookup:2}: {line['tokens']} tokens in "
                    f"{line['batches']} batches, {line['accepted']}/{line['drafted']} right, "
                    f"{mib:.3f} MiB and {line['ms']:.2f} ms a token, speed x {line['speed']:.2f} "
                    f"({line['least']:.2f}..{line['most']:.2f})",
                    flush=True,
                )
        for llm in models.values():
            llm.close()
    result: dict[str, Any] = {"cells": found}
    if options.answers:
        equal, count = same_answers(options.model, 8, options.answers)
        result["answers"] = {"equal": equal, "of": count}
        print(f"{equal} of {count} greedy answers are those of plain decoding")
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
