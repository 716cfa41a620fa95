"""The tokenizer: byte-level BPE, learned from the corpus, as llama.cpp's `qwen2` splits text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from corpus import documents
from tasks import KINDS, item
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 4096
END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, IM_START, IM_END)

# Each digit stands alone: a sum is then learned digit by digit.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _training_text() -> Iterator[str]:
    """Every tenth document, and as much of tasks, so that their words are whole tokens."""
    for number, document in enumerate(documents()):
        if number % 10 == 0 and not document.held:
            yield document.text
    rng = random.Random(0)
    for _ in range(20_000):
        one = item(rng.choice(KINDS), rng, held=False)
        yield one.prompt + one.answer + one.end


def load(folder: Path) -> Tokenizer:
    """The tokenizer kept in `folder`, made the first time."""
    path = folder / "tokenizer.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_training_text(), trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))
