"""Fixture models written once a session, what is fed to them, and their resident logits."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead import Llama
from routeahead.engine.packing import write_packed
from support import models
from support.reference import Logits, Resident

CONTEXT = 256
THREADS = 1  # the fixtures are too small to gain from a second one


def token_batches(seed: int, *, prompt: int = 13, decode: int = 20) -> list[list[int]]:
    """A prompt and then single tokens, all random: a random model's own text is a loop of the same
    experts, and nothing would miss."""
    tokens = np.random.default_rng(seed).integers(3, 259, size=prompt + decode).tolist()
    return [tokens[:prompt], *([t] for t in tokens[prompt:])]


# Two prompts, evaluated one after the other by one process.
PROMPTS = (token_batches(1), token_batches(2, prompt=1, decode=8))


def evaluate(llm: Llama, batches: Sequence[Sequence[int]]) -> Logits:
    """Logits (batches, vocabulary) after each batch, from an empty context: the first batch is the
    prompt, the rest is decode."""
    llm.reset()
    rows = []
    for index, batch in enumerate(batches):
        llm.phase = "decode" if index else "prefill"
        llm.eval(batch)
        pointer = llm._ctx.get_logits_ith(-1)
        rows.append(np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy())
    return np.stack(rows)


def with_budget(load: Callable[..., Llama], name: str, share: float, **settings: object) -> Llama:
    """A fixture model whose cache holds that share of its experts, however little that is."""
    llm = load(name, cache_mb=1, force_cache=True, **settings)
    assert llm.source
    llm.source.cache.budget = int(llm.layout.expert_bytes * share)
    return llm


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def csv_facts(path: Path) -> Any:
    """What a trace says of the whole run, beside its first line."""
    return json.loads(csv_rows(path)[0]["facts"])


class Library:
    """Fixture models by name (and number of shards), with their resident logits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[tuple[str, int], Path] = {}
        self._logits: dict[str, list[npt.NDArray[np.float32]]] = {}

    def path(self, name: str, shards: int = 1) -> Path:
        key = (name, shards)
        if key not in self._paths:
            spec = models.FIXTURES.get(name) or models.for_quant(name)
            folder = self._folder / f"{name}-{shards}"
            folder.mkdir()
            self._paths[key] = models.write(folder / "model.gguf", spec, shards=shards)
        return self._paths[key]

    def packed(self, name: str, shards: int = 1) -> Path:
        """The same model, each expert in one piece."""
        target = self._folder / f"{name}-{shards}" / "packed.gguf"
        if not target.exists():
            write_packed(self.path(name, shards), target)
        return target

    def resident(self, name: str) -> list[Logits]:
        """One array for each of PROMPTS."""
        if name not in self._logits:
            model = Resident(self.path(name), n_ctx=CONTEXT, threads=THREADS)
            self._logits[name] = [model.evaluate(batches) for batches in PROMPTS]
            model.close()
        return self._logits[name]
