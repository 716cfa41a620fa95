"""Reads the routers' inputs, the hidden vectors, out of the graph.

The input of a layer's router product usually still lies in memory when the top-k is known, which
spares a stop. The node filter proves that for each layer of each token; if the proof fails
(gemma4's argsort is given the input's memory), the graph is stopped at the router product and the
hidden vector is copied there.

What a layer's *attention* is given, `attn_norm-L`, is read at a stop of its own, right after it was
computed, if anybody wants it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import StreamError
from routeahead.llamacpp import ggml
from routeahead.llamacpp.lending import Lending
from routeahead.llamacpp.node_filter import (
    ANNOUNCED,
    DAMAGED,
    IS_HOST,
    NORM,
    NORM_MASK,
    NORM_PREFIX,
    ROUTER,
    ROUTER_INPUT,
    ROUTER_INPUT_END,
    ROUTER_INPUT_TENSOR,
    STOP_AT_ROUTER,
)
from routeahead.llamacpp.router_graph import Router, read_router
from routeahead.llamacpp.tensor_values import fetch, on_host
from routeahead.types import Floats


class RouterInput:
    """Follows a token through its MoE layers by means of the filter's state words.

    Attributes:
        lending: routers that compute for a later layer.
        routers: by layer, as its graph showed it; None if it is not understood.
        damaged: layers whose input does not survive until the top-k.
    """

    def __init__(self, state: npt.NDArray[np.int64], layers: Sequence[int]) -> None:
        self._state = state
        self.lending = Lending(state)
        self._first = layers[0]
        self._next = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._proven: set[int] = set()
        self._copy: Floats | None = None
        self._reading = self._attending = False
        self.routers: dict[int, Router | None] = {}
        self.damaged: set[int] = set()

    def begin(self, *, reading: bool, attending: bool = False) -> None:
        """A batch begins. `reading`: its hidden vectors are wanted; `attending`: and what each
        layer's attention is given."""
        self._reading, self._attending, self._copy = reading or attending, attending, None
        self._expect(self._first)

    def at_norm(self, norm: ggml.Tensor) -> Floats:
        """What the attention of a layer is given (rows, width), in the graph's own memory."""
        self._state[NORM] = 0
        return self._hidden(norm, int(norm.ne[1]), int(norm.ne[0]))

    def at_router(self, product: ggml.Tensor) -> None:
        """The router product was computed, and its input is intact."""
        hidden = ggml.tensor_at(product.src[1])
        width, rows = int(hidden.ne[0]), int(hidden.ne[1])
        apart = hidden.nb[1] != 4 * width and rows > 1
        self._copy = None if apart else self._hidden(hidden, rows, width, copied=True)

    def at_topk(self, layer: int, topk: int, rows: int) -> Floats | None:
        """The hidden vectors (rows, width) at the top-k of `layer`, at address `topk`.

        None while nobody reads, and if they are damaged or were not found.
        """
        if layer not in self.routers:
            self.routers[layer] = read_router(topk)
        if not self._reading:
            return None
        if self._state[NORM]:
            raise StreamError(
                f"layer {layer} shows no {NORM_PREFIX.decode()}{layer} before its router: a depth "
                "of 0.5 cannot be used with this architecture; give 1 or more"
            )
        start, end = int(self._state[ROUTER_INPUT]), int(self._state[ROUTER_INPUT_END])
        damaged = bool(self._state[DAMAGED])
        copied, self._copy = self._copy, None
        router = self.routers[layer]
        width = int(ggml.tensor_at(router.matrix).ne[0]) if router else 0
        seen = start > 0 and end - start == 4 * width * rows  # whose fate the filter followed
        if seen:
            (self.damaged if damaged else self._proven).add(layer)
        self._expect(self._next[layer])
        if copied is not None:
            return copied if len(copied) == rows else None
        if not seen or damaged:
            return None
        return self._hidden(ggml.tensor_at(int(self._state[ROUTER_INPUT_TENSOR])), rows, width)

    def skip(self) -> None:
        """The next layer's hidden vector is not wanted."""
        self._state[ROUTER] = 0

    def _expect(self, layer: int) -> None:
        """`layer` is the next one whose router product will be asked for."""
        state, router = self._state, self.routers.get(layer)
        state[ROUTER_INPUT] = 0
        # The first layer's comes before anybody knows of a batch that is not announced.
        if self._attending and (state[ANNOUNCED] or layer != self._first):
            tail = b"%s%d\0" % (NORM_PREFIX[8:], layer)
            state[NORM] = int.from_bytes(tail, "little")
            state[NORM_MASK] = (1 << 8 * len(tail)) - 1
        state[ROUTER] = router.matrix if self._reading and router else 0
        # A layer stops at its router until one token has proved that it need not, so that the first
        # token's can be read too.
        state[STOP_AT_ROUTER] = layer in self.damaged or layer not in self._proven

    def _hidden(
        self, tensor: ggml.Tensor, rows: int, width: int, *, copied: bool = False
    ) -> Floats:
        hidden: Floats
        if self._state[IS_HOST] and not on_host(tensor):
            hidden = fetch(tensor).view(np.float32).reshape(rows, width)
        else:
            memory: Any = (ctypes.c_float * (rows * width)).from_address(tensor.data)
            hidden = np.frombuffer(memory, np.float32).reshape(rows, width)
            hidden = hidden.copy() if copied else hidden
        hidden.flags.writeable = False  # it is the graph's
        return hidden
