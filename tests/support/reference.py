"""Resident logits from llama.cpp alone. Imports nothing from the package under test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

LAYERS = 0
"""Layers that go to a device, less their experts."""

Logits = npt.NDArray[np.float32]


def experts_in_ram() -> Any:
    """What llama.cpp's `--cpu-moe` gives to the loader: (pattern, buffer type), and an end."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    llama = ctypes.CDLL(str(folder / "libllama.so"))
    llama.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    pattern = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    entries = (ctypes.c_void_p * 4)()
    experts_in_ram.pattern = ctypes.c_char_p(pattern)  # type: ignore[attr-defined]  # kept alive
    entries[0] = ctypes.cast(experts_in_ram.pattern, ctypes.c_void_p)  # type: ignore[attr-defined]
    entries[1] = llama.ggml_backend_cpu_buffer_type()
    return entries


class Resident:
    """A model loaded whole, evaluated batch by batch."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = 256,
        threads: int = 2,
        callback: Any = None,
        adapter: Path | None = None,
        embeddings: bool = False,
    ) -> None:
        C.llama_backend_init()
        model_params = C.llama_model_default_params()
        model_params.use_extra_bufts = False
        model_params.n_gpu_layers = LAYERS
        if LAYERS:
            self._overrides = experts_in_ram()
            model_params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        model_params.load_mode = C.LLAMA_LOAD_MODE_NONE
        self._model = C.llama_model_load_from_file(str(path).encode(), model_params)
        assert self._model, path
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, n_ctx
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.op_offload = False
        params.embeddings = embeddings
        if callback:
            params.cb_eval = callback
        self._context = C.llama_init_from_model(self._model, params)
        if adapter:
            loaded = C.llama_adapter_lora_init(self._model, str(adapter).encode())
            adapters = (C.llama_adapter_lora_p_ctypes * 1)(loaded)
            assert loaded and not C.llama_set_adapters_lora(
                self._context, adapters, 1, (ctypes.c_float * 1)(1.0)
            )
        self._memory = C.llama_get_memory(self._context)
        self.has_memory = bool(self._memory)
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

    def rows(self, tokens: Sequence[int], at: int) -> Logits:
        """Logits (len(tokens), vocabulary) of every row of one batch that begins at position `at`;
        what the context held from there on is forgotten."""
        assert C.llama_memory_seq_rm(self._memory, 0, at, -1)
        batch = _batch(tokens, at)
        assert C.llama_decode(self._context, batch) == 0
        C.llama_batch_free(batch)
        pointer = C.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(len(tokens), self.n_vocab)).copy()

    def embed(self, tokens: Sequence[int]) -> Logits:
        """Embeddings of a text, (1, width), or (tokens, width) of a model that does not pool."""
        batch = _batch(tokens, 0)
        assert C.llama_decode(self._context, batch) == 0
        C.llama_batch_free(batch)
        width = C.llama_model_n_embd(self._model)
        pooled = C.llama_get_embeddings_seq(self._context, 0)
        pointer = pooled or C.llama_get_embeddings(self._context)
        shape = (1 if pooled else len(tokens), width)
        return np.ctypeslib.as_array(pointer, shape=shape).copy()

    def close(self) -> None:
        C.llama_free(self._context)
        C.llama_model_free(self._model)


def _batch(tokens: Sequence[int], at: int) -> Any:
    """A batch of one sequence with outputs for every row."""
    batch = C.llama_batch_init(len(tokens), 0, 1)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, at + index
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        batch.logits[index] = True
    batch.n_tokens = len(tokens)
    return batch
