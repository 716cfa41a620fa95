"""Reads the gates' inputs out of the graph.

The input of a layer's gate product usually still lies in memory when the top-k is known, which
spares a stop. The graph filter proves that for each layer of each token; where the proof fails
(gemma4's argsort is given the input's memory), the graph is stopped at the gate product and the
row is copied there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp import ggml
from routeahead.llamacpp.node_filter import DAMAGED, GATE, GATE_END, GATE_INPUT, STOP_AT_GATE
from routeahead.llamacpp.router_graph import Router, read_router

Row = npt.NDArray[np.float32]


class GateTap:
    """Follows a token through its MoE layers by means of the filter's state words.

    Attributes:
        routers: by layer, as its graph showed it; None where it is not understood.
        damaged: layers whose input does not survive until the top-k.
    """

    def __init__(self, state: npt.NDArray[np.int64], layers: Sequence[int]) -> None:
        self._state = state
        self._first = layers[0]
        self._next = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._proven: set[int] = set()
        self._copy: Row | None = None
        self._reading = False
        self.routers: dict[int, Router | None] = {}
        self.damaged: set[int] = set()

    def begin(self, *, reading: bool) -> None:
        """A batch begins; `reading`: its gate inputs are wanted."""
        self._reading, self._copy = reading, None
        self._expect(self._first)

    def at_gate(self, product: ggml.Tensor) -> None:
        """The gate product was computed, and its input is intact."""
        row = ggml.tensor_at(product.src[1])
        self._copy = _row(int(row.data), int(row.ne[0])).copy() if row.ne[1] == 1 else None

    def at_topk(self, layer: int, topk: int) -> Row | None:
        """The gate's input (width,) at the top-k of `layer`, at address `topk`.

        None while nobody reads, for several rows, and where it is damaged or was not found.
        """
        if layer not in self.routers:
            self.routers[layer] = read_router(topk)
        if not self._reading:
            return None
        start, end = int(self._state[GATE_INPUT]), int(self._state[GATE_END])
        damaged = bool(self._state[DAMAGED])
        copied, self._copy = self._copy, None
        router = self.routers[layer]
        width = int(ggml.tensor_at(router.gate).ne[0]) if router else 0
        seen = start > 0 and end - start == 4 * width  # one row, whose fate the filter followed
        if seen:
            (self.damaged if damaged else self._proven).add(layer)
        self._expect(self._next[layer])
        if copied is not None:
            return copied
        return _row(start, width) if seen and not damaged else None

    def _expect(self, layer: int) -> None:
        """`layer` is the next one whose gate product will be asked for."""
        state, router = self._state, self.routers.get(layer)
        state[GATE_INPUT] = 0
        state[GATE] = router.gate if self._reading and router else 0
        # A layer stops at its gate until one token has proved that it need not, so that the first
        # token's rows can be read too.
        state[STOP_AT_GATE] = layer in self.damaged or layer not in self._proven


def _row(address: int, width: int) -> Row:
    memory: Any = (ctypes.c_float * width).from_address(address)
    row: Row = np.frombuffer(memory, np.float32)
    return row
