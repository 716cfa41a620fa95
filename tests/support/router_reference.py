"""What route-ahead must have committed, worked out by plain llama.cpp and NumPy alone.

Imports nothing from the package under test. A resident context is forced to the routing that a run
recorded, so that its hidden states are that run's, and the inputs of all router products are copied
right after those products. The rules by which the fixtures' architectures choose experts are
written out here once more, in float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from support.models import Spec
from support.reference import Logits, Resident

Ids = npt.NDArray[np.int32]
Key = tuple[int, int]  # (position of the token, layer)


class Tensor(ctypes.Structure):
    """The head of `struct ggml_tensor`, written down from ggml.h."""

    _fields_ = [
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    ]  # fmt: skip


class Stepwise(Resident):
    """Knows, while it evaluates, which position it is at and whether it decodes: the first batch is
    the prompt, the rest is decode."""

    _position, _decoding = 0, False

    def evaluate(self, batches: Sequence[Sequence[int]]) -> Logits:
        self._position, rows = 0, []
        for index, batch in enumerate(batches):
            self._decoding = index > 0
            rows.append(super().evaluate([batch], keep=index > 0))
            self._position += len(batch)
        return np.concatenate(rows)


class Forced(Stepwise):
    """A resident model that routes as recorded.

    Attributes:
        inputs: (position, layer) → float32 (width,), input of that router product in decode.
        attended: the same of what the layer's attention is given, the output of its norm.
        chosen: (position, layer) → int32 (top_k,), what the router itself chose there.
    """

    def __init__(self, path: Path, recorded: Mapping[Key, Ids], *, threads: int) -> None:
        self._recorded = recorded
        self.inputs: dict[Key, npt.NDArray[np.float32]] = {}
        self.attended: dict[Key, npt.NDArray[np.float32]] = {}
        self.chosen: dict[Key, Ids] = {}
        self._callback = C.ggml_backend_sched_eval_callback(self._on_node)
        super().__init__(path, threads=threads, callback=self._callback)

    def _on_node(self, address: int, ask: bool, _: object) -> bool:
        tensor = Tensor.from_address(address)
        kind, _, layer = tensor.name.partition(b"-")
        product, topk = kind == b"ffn_moe_logits", kind == b"ffn_moe_topk"
        norm = kind == b"attn_norm" and layer.isdigit()
        if ask or not self._decoding:
            return self._decoding and (product or topk or norm)
        for row in range(tensor.ne[1]):
            key = (self._position + row, int(layer))
            if product or norm:
                given = tensor if norm else Tensor.from_address(tensor.src[1])
                address = given.data + row * given.nb[1]
                memory = (ctypes.c_float * given.ne[0]).from_address(address)
                vectors = self.attended if norm else self.inputs
                vectors[key] = np.array(memory, np.float32)
            else:
                address = tensor.data + row * tensor.nb[1]
                ids = np.frombuffer((ctypes.c_int32 * tensor.ne[0]).from_address(address), np.int32)
                self.chosen[key] = ids.copy()
                ids[:] = self._recorded[key]
        return True

    def rows(self, tokens: Sequence[int], at: int) -> Logits:
        self._position, self._decoding = at, True
        return super().rows(tokens, at)


class Routers:
    """The routers of a fixture model, from its file and its specification."""

    def __init__(self, path: Path, spec: Spec) -> None:
        self._spec = spec
        self._tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}
        self.layers = list(range(spec.dense_layers, spec.layers))

    def scores(self, layer: int, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Selection scores (experts,) of a gate input; -inf for experts outside of the groups."""
        gate = self._tensors[f"blk.{layer}.ffn_gate_inp.weight"].astype(np.float64)
        logits = gate @ row.astype(np.float64)
        if self._spec.arch == "gpt-oss":
            return logits + self._tensors[f"blk.{layer}.ffn_gate_inp.bias"]
        if self._spec.arch != "deepseek2":
            return logits  # softmax keeps the order
        scores = 1 / (1 + np.exp(-logits)) + self._tensors[f"blk.{layer}.exp_probs_b.bias"]
        if not self._spec.groups:
            return scores
        groups = scores.reshape(self._spec.groups, -1)
        worth = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        best = np.argsort(worth)[-self._spec.groups // 2 :]
        masked = np.full_like(groups, -np.inf)
        masked[best] = groups[best]
        return masked.ravel()

    def selection_scores(self, layer: int, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """What the graph ranks: as `scores`, after the activation where there is one before."""
        scores = self.scores(layer, row)
        if self._spec.arch in ("gpt-oss", "deepseek2"):
            return scores
        powers = np.exp(scores - scores.max())
        return powers / powers.sum()

    def is_ranking(self, ids: Ids, scores: npt.NDArray[np.float64], margin: float) -> bool:
        """Whether `ids` are the best experts, best first, with scores equal within `margin`."""
        mine, others = scores[ids], np.delete(scores, ids)
        falls = np.all(np.diff(mine) <= margin)
        return bool(
            falls and mine.min() >= others.max() - margin and len(set(ids.tolist())) == len(ids)
        )

    def ranking(self, scores: npt.NDArray[np.float64]) -> Ids:
        return np.argsort(-scores, kind="stable")[: self._spec.top_k].astype(np.int32)
