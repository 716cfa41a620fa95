"""Batches that go to `llama_decode` directly, as some clients send them."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np

from routeahead import Llama
from support.reference import Logits


def decode(llm: Llama, tokens: Sequence[int], position: int) -> int:
    """Evaluates `tokens` from `position` on; returns what `llama_decode` returns."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index == len(tokens) - 1
        return int(llama_cpp.llama_decode(llm.ctx, batch))
    finally:
        llama_cpp.llama_batch_free(batch)


def evaluate(llm: Llama, batches: Sequence[Sequence[int]]) -> Logits:
    """Logits (batches, vocabulary) after each batch, from an empty context."""
    clear(llm)
    position, rows = 0, []
    for batch in batches:
        assert decode(llm, batch, position) == 0
        position += len(batch)
        pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        rows.append(np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy())
    return np.stack(rows)


def clear(llm: Llama) -> None:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)


def next_position(llm: Llama) -> int:
    """How many positions the context's memory holds."""
    return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)) + 1
