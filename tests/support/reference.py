"""Resident logits from llama.cpp alone. Imports nothing from the package under test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

Logits = npt.NDArray[np.float32]


class Resident:
    """A model loaded whole, evaluated batch by batch."""

    def __init__(
        self, path: Path, *, n_ctx: int = 256, threads: int = 2, callback: Any = None
    ) -> None:
        C.llama_backend_init()
        model_params = C.llama_model_default_params()
        model_params.use_extra_bufts = False
        model_params.load_mode = C.LLAMA_LOAD_MODE_NONE
        self._model = C.llama_model_load_from_file(str(path).encode(), model_params)
        assert self._model, path
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, n_ctx
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.op_offload = False
        if callback:
            params.cb_eval = callback
        self._context = C.llama_init_from_model(self._model, params)
        self._memory = C.llama_get_memory(self._context)
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self._model))

    def evaluate(self, batches: Sequence[Sequence[int]], *, keep: bool = False) -> Logits:
        """Logits (batches, vocabulary) after each batch's last token, from an empty context, or
        (`keep`) after what it holds."""
        if not keep:
            C.llama_memory_clear(self._memory, True)
        rows = []
        for tokens in batches:
            array = (C.llama_token * len(tokens))(*tokens)
            assert C.llama_decode(self._context, C.llama_batch_get_one(array, len(tokens))) == 0
            pointer = C.llama_get_logits_ith(self._context, -1)
            rows.append(np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).copy())
        return np.stack(rows)

    def close(self) -> None:
        C.llama_free(self._context)
        C.llama_model_free(self._model)
