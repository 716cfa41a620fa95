"""Trains the embedded model: `python training/train.py WORK`.

WORK keeps the tokenizer, the encoded corpus, a checkpoint every few minutes and the loss curve
(losses.csv); the same command continues from there. Afterwards `training/export.py WORK OUT.gguf`
writes the model.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import vocabulary
from corpus import documents
from model import SHAPES, Model
from tasks import KINDS, item
from torch import Tensor

BATCH, LENGTH = 8, 512
PEAK_RATE, WARM_UP, DECAY_FROM = 2e-3, 100, 0.6
BALANCE = 0.01
TASK_SHARE = 0.5  # of the tokens
# Sums and numbers are rules to find out, capitals and functions are soon learned.
TASK_WEIGHTS = {"sums": 0.4, "numbers": 0.25, "capitals": 0.2, "functions": 0.15}
CHAT_SHARE = 0.15  # of the tasks, in the form of the chat template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokens", type=float, default=20e6, help="to train on, in all")
    parser.add_argument("--model", choices=SHAPES, default="qwen3moe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-s", type=float, default=300)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(os.cpu_count() or 1)
    Training(arguments).run()


class Training:
    """One run, from its checkpoint on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._work, self._every = arguments.work, arguments.checkpoint_s
        self._steps = int(arguments.tokens / (BATCH * LENGTH))
        self._data = Data(self._work, arguments.seed)
        self._model = Model(SHAPES[arguments.model])
        decayed = [p for p in self._model.parameters() if p.ndim > 1]
        others = [p for p in self._model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
        self._step = 0
        self._spent = 0.0  # seconds, over all sessions
        path = self._work / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._step, self._spent = state["step"], state["spent_s"]

    def run(self) -> None:
        with (self._work / "losses.csv").open("a", newline="") as file:
            curve = csv.writer(file)
            start = saved = time.monotonic()
            while self._step < self._steps:
                loss, balance = self._one(self._data.batch(self._step))
                self._step += 1
                now = time.monotonic()
                spent = self._spent + now - start
                if self._step % 20 == 0:
                    held = f"{self._held():.4f}" if self._step % 200 == 0 else ""
                    row = [self._step, f"{loss:.4f}", f"{balance:.4f}", held, f"{spent:.0f}"]
                    curve.writerow(row)
                    file.flush()
                    print(
                        f"of {self._steps}: step, loss, balance, held-out loss, s:",
                        *row,
                        flush=True,
                    )
                if now - saved > self._every or self._step == self._steps:
                    self._save(spent)
                    saved = now

    def _rate(self) -> float:
        decay_from = DECAY_FROM * self._steps
        if self._step < WARM_UP:
            return PEAK_RATE * (self._step + 1) / WARM_UP
        if self._step < decay_from:
            return PEAK_RATE
        return PEAK_RATE * (self._steps - self._step) / (self._steps - decay_from)

    def _one(self, batch: Tensor) -> tuple[float, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        loss, balance = self._loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach()), float(balance.detach())

    def _loss(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, balance = self._model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()), balance

    def _held(self) -> float:
        """Loss on held-out text, in nats a token."""
        with torch.no_grad():
            return float(np.mean([float(self._loss(b)[0]) for b in self._data.held_batches(4)]))

    def _save(self, spent: float) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "spent_s": spent,
        }
        path = self._work / "checkpoint.pt"
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)


class Data:
    """Batches by number: the same numbers give the same batches, in whatever session."""

    def __init__(self, work: Path, seed: int) -> None:
        self._tokenizer = vocabulary.load(work)
        self._seed = seed
        self._text = self._encoded(work / "text.npy", held=False)
        self._held = self._encoded(work / "held.npy", held=True)

    def _encoded(self, path: Path, *, held: bool) -> np.ndarray:
        if not path.exists():
            texts = [d.text + vocabulary.END for d in documents() if d.held == held]
            encoded = self._tokenizer.encode_batch(texts)
            tokens = np.fromiter(itertools.chain.from_iterable(e.ids for e in encoded), np.uint16)
            np.save(path, tokens)
        return np.load(path, mmap_mode="r")

    def batch(self, number: int) -> Tensor:
        """int64 (BATCH, LENGTH + 1)."""
        rng = random.Random(f"{self._seed} {number}")
        tasks = round(BATCH * TASK_SHARE)
        rows = [self._tasks(rng) for _ in range(tasks)]
        rows += [self._piece(self._text, rng) for _ in range(BATCH - tasks)]
        return torch.tensor(np.stack(rows).astype(np.int64))

    def held_batches(self, count: int) -> Iterator[Tensor]:
        rng = random.Random("held")
        for _ in range(count):
            rows = [self._piece(self._held, rng) for _ in range(BATCH)]
            yield torch.tensor(np.stack(rows).astype(np.int64))

    @staticmethod
    def _piece(tokens: np.ndarray, rng: random.Random) -> np.ndarray:
        start = rng.randrange(len(tokens) - LENGTH - 1)
        return np.asarray(tokens[start : start + LENGTH + 1])

    def _tasks(self, rng: random.Random) -> np.ndarray:
        """A row of tasks, each with an end-of-text after it."""
        kinds, weights = zip(*((kind, TASK_WEIGHTS[kind]) for kind in KINDS), strict=True)
        ids: list[int] = []
        while len(ids) < LENGTH + 1:
            one = item(rng.choices(kinds, weights)[0], rng, held=False)
            text = one.prompt + one.answer + one.end
            if one.kind != "functions" and rng.random() < CHAT_SHARE:
                text = chat(one.prompt, one.answer)
            ids += self._tokenizer.encode(text + vocabulary.END).ids
        return np.array(ids[: LENGTH + 1])


def chat(prompt: str, answer: str) -> str:
    """A task as the chat template writes it."""
    asked = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    start, end = vocabulary.IM_START, vocabulary.IM_END
    return f"{start}user\n{asked}{end}\n{start}assistant\n{answer.strip()}{end}\n"


if __name__ == "__main__":
    main()
