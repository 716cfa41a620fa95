"""Trains a model: `python training/train.py WORK`.

WORK keeps the tokenizer, the encoded corpus, a checkpoint every few minutes and the loss curve
(losses.jsonl); the same command continues from there. Afterwards `training/export.py WORK OUT.gguf`
writes the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import vocabulary
from corpus import documents
from model import SHAPES, Model
from tasks import KINDS, Item, item
from torch import Tensor

# Attention over short rows costs less; the last steps teach the distant positions.
SHORT, LONG, LONG_FROM = 256, 1024, 0.85
PEAK_RATE, WARM_UP, DECAY_FROM = 2e-3, 100, 0.5
BALANCE = 0.01
TASK_SHARE = 0.6  # of the rows, rounded
# Shares of the tasks, as (from which part of the training on, share of each kind): what is soon
# learned needs little after that, and sums, a rule to find out, need most of the time.
CURRICULUM = (
    (0.0, {"sums": 0.6, "numbers": 0.2, "capitals": 0.1, "functions": 0.1}),
    (0.24, {"sums": 0.75, "numbers": 0.07, "capitals": 0.09, "functions": 0.09}),
)
SUM_WEIGHT = 3.0  # of a sum's answer in the loss, from the second part on; others count 1
CHAT_SHARE = 0.15  # of the tasks, in the form of the chat template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokens", type=float, default=18e6, help="to train on, in all")
    parser.add_argument("--batch", type=int, default=4096, help="tokens a step")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="not bfloat16: ten times as fast on a CPU without bfloat16 instructions",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", choices=SHAPES, default="qwen3moe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-s", type=float, default=300)
    arguments = parser.parse_args()
    keep_memory()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    Training(arguments).run()


def keep_memory() -> None:
    """Starts again with an allocator that does not give freed tensors back to the system.

    A step then takes two thirds of the time: most of it was the first touch of fresh pages.
    """
    wanted = {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**28),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    if not wanted.items() <= os.environ.items():
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Training:
    """One run, from its checkpoint on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._work, self._every = arguments.work, arguments.checkpoint_s
        self._steps = int(arguments.tokens / arguments.batch)
        self._bfloat16 = not arguments.float32
        self._data = Data(self._work, arguments.seed, arguments.batch)
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
        with self._curve().open("a") as file:
            start = saved = time.monotonic()
            while self._step < self._steps:
                length = SHORT if self._step < LONG_FROM * self._steps else LONG
                part = self._step / self._steps
                loss, balance = self._one(self._data.batch(self._step, length, part))
                self._step += 1
                now = time.monotonic()
                spent = self._spent + now - start
                if self._step % 20 == 0 or self._step == self._steps:
                    row: dict[str, object] = {
                        "step": self._step,
                        "of": self._steps,
                        "loss": f"{loss:.4f}",
                        "balance": f"{balance:.4f}",
                        "seconds": f"{spent:.0f}",
                    }
                    if self._step % 200 == 0 or self._step == self._steps:
                        row |= self._held_out()
                    print(json.dumps(row), file=file, flush=True)
                    print(*(f"{name} {value}" for name, value in row.items()), flush=True)
                if now - saved > self._every or self._step == self._steps:
                    self._save(spent)
                    saved = now

    def _curve(self) -> Path:
        """The loss curve's file, without what an interrupted run wrote after its checkpoint."""
        path = self._work / "losses.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        kept = [row for row in rows if json.loads(row)["step"] <= self._step]
        path.write_text("".join(f"{row}\n" for row in kept))
        return path

    def _rate(self) -> float:
        decay_from = DECAY_FROM * self._steps
        if self._step < WARM_UP:
            return PEAK_RATE * (self._step + 1) / WARM_UP
        if self._step < decay_from:
            return PEAK_RATE
        return PEAK_RATE * (self._steps - self._step) / (self._steps - decay_from)

    def _one(self, batch: Batch) -> tuple[float, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        logits, balance = self._forward(batch)
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        self._optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach()), float(balance.detach())

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._bfloat16):
            logits, balance = self._model(batch.tokens, batch.wanted)
        return logits.float(), balance

    @torch.no_grad()
    def _held_out(self) -> dict[str, float]:
        """Loss on held-out text in nats a token, and the share of held-out answers that are right.

        An answer is right if every token of it is the likeliest one, given those before.
        """
        losses = [
            float(F.cross_entropy(self._forward(batch)[0], batch.targets))
            for batch in self._data.held_text()
        ]
        found = {"held_loss": round(float(np.mean(losses)), 4)}
        for kind in KINDS:
            batch, rows = self._data.held_tasks(kind)
            wrong = self._forward(batch)[0].argmax(-1) != batch.targets
            found[kind] = round(1 - len(set(rows[wrong].tolist())) / (int(rows.max()) + 1), 3)
        return found

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


@dataclass(frozen=True)
class Batch:
    """One step's tokens.

    `tokens` int64 (rows, length); `wanted` bool, the same: positions whose next token counts;
    `targets` int64 and `weights` float32 (wanted positions,): those tokens, and how much."""

    tokens: Tensor
    wanted: Tensor
    targets: Tensor
    weights: Tensor

    @staticmethod
    def of(rows: list[np.ndarray], weights: list[np.ndarray]) -> Batch:
        """Of token rows (length + 1,) and how much each token counts."""
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        weight = torch.from_numpy(np.stack(weights).astype(np.float32))[:, 1:].contiguous()
        wanted = weight > 0
        return Batch(tokens[:, :-1].contiguous(), wanted, tokens[:, 1:][wanted], weight[wanted])


class Data:
    """Batches by number: the same numbers give the same batches, in whatever session."""

    def __init__(self, work: Path, seed: int, batch: int) -> None:
        self._tokenizer = vocabulary.load(work)
        self._seed, self._batch = seed, batch
        self._text = self._encoded(work / "text.npy", held=False)
        self._held = self._encoded(work / "held.npy", held=True)

    def _encoded(self, path: Path, *, held: bool) -> np.ndarray:
        if not path.exists():
            texts = [d.text + vocabulary.END for d in documents() if d.held == held]
            encoded = self._tokenizer.encode_batch(texts)
            tokens = np.fromiter(itertools.chain.from_iterable(e.ids for e in encoded), np.uint16)
            np.save(path, tokens)
        return np.load(path, mmap_mode="r")

    def batch(self, number: int, length: int, part: float) -> Batch:
        """`part` of the training, 0 to 1, has been done."""
        rng = random.Random(f"{self._seed} {number}")
        count = self._batch // length
        tasks = round(count * TASK_SHARE)
        shares = next(shares for begin, shares in reversed(CURRICULUM) if part >= begin)
        sums = SUM_WEIGHT if part >= CURRICULUM[1][0] else 1.0
        made = (self._tasks(rng, length, shares, sums) for _ in range(tasks))
        rows, weights = zip(*made, strict=True)
        text = [self._piece(self._text, rng, length) for _ in range(count - tasks)]
        return Batch.of([*rows, *text], [*weights, *(np.ones(length + 1) for _ in text)])

    def held_text(self) -> Iterator[Batch]:
        rng = random.Random("held")
        for _ in range(4):
            rows = [self._piece(self._held, rng, SHORT) for _ in range(16)]
            yield Batch.of(rows, [np.ones(SHORT + 1) for _ in rows])

    def held_tasks(self, kind: str, each: int = 50) -> tuple[Batch, Tensor]:
        """`each` items, and the item (wanted positions,) that a wanted position belongs to."""
        rng, length = random.Random(f"held {kind}"), 96
        rows, weights = [], []
        for _ in range(each):
            ids, counts = self._item(item(kind, rng, held=True), chatty=False)
            fill = length + 1 - len(ids)
            rows.append(np.array(ids + [0] * fill))
            # The end-of-text after an item is no part of its answer.
            weights.append(np.array([*counts[:-1], False] + [False] * fill))
        batch = Batch.of(rows, weights)
        return batch, batch.wanted.nonzero()[:, 0]

    @staticmethod
    def _piece(tokens: np.ndarray, rng: random.Random, length: int) -> np.ndarray:
        start = rng.randrange(len(tokens) - length - 1)
        return np.asarray(tokens[start : start + length + 1])

    def _tasks(
        self, rng: random.Random, length: int, shares: dict[str, float], sum_weight: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """A row of tasks, each with an end-of-text after it; only answers and ends count."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length + 1:
            [kind] = rng.choices(KINDS, [shares[kind] for kind in KINDS])
            chatty = kind != "functions" and rng.random() < CHAT_SHARE
            more, counts = self._item(item(kind, rng, held=False), chatty=chatty)
            ids += more
            weight = sum_weight if kind == "sums" else 1.0
            weights += [weight * count for count in counts]
        return np.array(ids[: length + 1]), np.array(weights[: length + 1])

    def _item(self, one: Item, *, chatty: bool) -> tuple[list[int], list[bool]]:
        """Tokens, and whether each counts."""
        asked, answered = chat(one) if chatty else (one.prompt, one.answer + one.end)
        prompt = self._tokenizer.encode(asked).ids
        answer = self._tokenizer.encode(answered + vocabulary.END).ids
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def chat(one: Item) -> tuple[str, str]:
    """Question and answer as the chat template writes them."""
    asked = one.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    start, end = vocabulary.IM_START, vocabulary.IM_END
    return f"{start}user\n{asked}{end}\n{start}assistant\n", f"{one.answer.strip()}{end}\n"


if __name__ == "__main__":
    main()
