"""What dropping must have computed, by plain llama.cpp alone.

Imports nothing from the package under test. A resident context computes with every expert, and
weighs those with 0 that a run recorded as dropped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from support.router_reference import Key, Stepwise, Tensor

Slots = npt.NDArray[np.bool_]


class Dropping(Stepwise):
    """A resident model whose decode gives recorded slots no weight."""

    def __init__(
        self, path: Path, dropped: Mapping[Key, Slots], *, threads: int, renorm: bool
    ) -> None:
        """`dropped`: (position of the token, layer) → (top_k,)."""
        self._dropped, self._renorm = dropped, renorm
        self._last: dict[int, bytes] = {}  # layer → name of the node with its final weights
        self._callback = C.ggml_backend_sched_eval_callback(self._on_node)
        super().__init__(path, threads=threads, callback=self._callback)

    def _on_node(self, address: int, ask: bool, _: object) -> bool:
        tensor = Tensor.from_address(address)
        kind, _, number = tensor.name.partition(b"-")
        if ask and kind == b"ffn_moe_weighted" and number.isdigit():  # and not a view of it
            self._last[int(number)] = Tensor.from_address(tensor.src[1]).name
        layer = next((n for n, name in self._last.items() if name == tensor.name), None)
        if layer is None or not self._decoding:
            return not ask
        if not ask:
            count = tensor.ne[1]
            memory = (ctypes.c_float * count).from_address(tensor.data)
            self._weigh(np.frombuffer(memory, np.float32), self._dropped[self._position, layer])
        return True

    def _weigh(self, weights: npt.NDArray[np.float32], dropped: Slots) -> None:
        mass = sum(weights.tolist())
        weights[dropped] = 0
        if self._renorm and dropped.any():
            weights *= np.float32(mass / sum(weights.tolist()))
