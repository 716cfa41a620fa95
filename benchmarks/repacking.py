"""How much llama.cpp's repacking of weights changes logits and greedy texts.

    python benchmarks/repacking.py [MODEL]

Compares the plain class with its defaults, which repacks, with the resident run of this package,
which does not; the streamed run equals the latter bit by bit. Text and questions are those of
benchmarks/data.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import routeahead
from routeahead.models import DEFAULT_MODEL

import llama_cpp  # isort: skip  # routeahead sets OpenMP's variables first

DATA = Path(__file__).parent / "data"
CONTEXT = 512
OPENING = 32  # tokens that are continued


def main() -> None:
    path = sys.argv[1] if sys.argv[1:] else str(DEFAULT_MODEL)
    common: Any = {"n_ctx": CONTEXT, "n_threads": 1, "n_threads_batch": 1, "logits_all": True}
    plain = llama_cpp.Llama(path, verbose=False, **common)
    resident = routeahead.Llama(path, resident=True, **common)
    text = (DATA / "held-out.txt").read_bytes()
    tokens = plain.tokenize(text)
    pieces = [tokens[at : at + CONTEXT] for at in range(0, len(tokens) - CONTEXT, CONTEXT)]
    for name, batches in (
        ("prompts", [[p] for p in pieces]),
        ("decode", [[[t] for t in pieces[0]]]),
    ):
        ours, theirs = (
            np.concatenate([logits(llm, b) for b in batches]) for llm in (resident, plain)
        )
        difference = np.abs(ours - theirs)
        agree = (ours.argmax(1) == theirs.argmax(1)).mean()
        print(
            f"{name}: {len(ours)} tokens, max |difference| {difference.max():.3f}, mean "
            f"{difference.mean():.4f}, deviation of the logits {theirs.std():.2f}; same argmax "
            f"{agree:.1%}"
        )
    lines = (DATA / "battery.jsonl").read_text(encoding="utf-8").splitlines()
    compare("answers", plain, resident, [json.loads(line)["prompt"] for line in lines], 24)
    openings = [tokens[at : at + OPENING] for at in range(0, len(tokens) - OPENING, CONTEXT // 4)]
    compare("continuations of 64 tokens", plain, resident, openings, 64)


def compare(name: str, plain: Any, resident: Any, prompts: list[Any], limit: int) -> None:
    """Prints how many greedy texts are the same."""
    same = sum(
        greedy(plain, prompt, limit) == greedy(resident, prompt, limit) for prompt in prompts
    )
    print(f"{name}: {same} of {len(prompts)} the same text")


def logits(llm: Any, batches: list[list[int]]) -> Any:
    """Logits (tokens, vocabulary) after each token of `batches`, from an empty context."""
    llm.reset()
    for batch in batches:
        llm.eval(batch)
    return llm.scores[: llm.n_tokens].copy()


def greedy(llm: Any, prompt: Any, limit: int) -> str:
    return str(llm.create_completion(prompt, max_tokens=limit, temperature=0)["choices"][0]["text"])


if __name__ == "__main__":
    main()
