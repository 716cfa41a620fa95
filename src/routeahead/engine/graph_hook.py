"""The Python half of the eval callback: reads tensors, and passes plain numbers on.

Order of events in a layer, as llama.cpp runs it:

1. `ffn_moe_topk-L` was computed → `Observer.routed(layer, ids, row)`.
2. A product over experts (MUL_MAT_ID) is *about to run*, while reads are pending →
   `Observer.product(...)` must return only once its bytes are there. Whether more products of the
   layer have reads pending decides if the graph stops after this one; otherwise llama.cpp would
   ask for the next product before this one has run, and nothing would overlap.

An exception must not cross into C, where ctypes would drop it and the decode would go on with
whatever is in memory. It is kept in `fault`; the filter ends the graph; `check` raises it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from routeahead.engine import ggml, graph_filter
from routeahead.engine.gate_tap import GateTap
from routeahead.engine.graph_filter import (
    ACK,
    CALLBACK,
    CALLS,
    FAULT,
    PENDING,
    ROUTED,
    TOPK_PREFIX,
    TRACING,
)
from routeahead.errors import StreamError

_StopFunction = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p, ctypes.c_int8)


class Observer(Protocol):
    """Who decides what happens at a stop. Called on the evaluation thread."""

    def routed(
        self, layer: int, ids: npt.NDArray[np.int32], row: npt.NDArray[np.float32] | None
    ) -> bool:
        """`ids` (rows, top-k) of `layer`, in the graph's own memory: a write changes the routing.

        `row` is the gate's input (width,), in memory that this call may read: None unless a gate
        tap is attached and the row could be read.

        Returns whether products of this layer must be announced to `product`.
        """
        ...

    def streams(self, tensor: int) -> bool:
        """Whether the weight tensor at address `tensor` is read from disk."""
        ...

    def product(self, tensor: int) -> bool:
        """A product with the weight tensor at address `tensor` is about to run.

        Returns whether a later product of the layer still has reads pending.
        """
        ...

    def weighted(self, weights: npt.NDArray[np.float32]) -> None:
        """The weights (rows, top-k) that the last routing got; only called while tracing."""
        ...

    def faulted(self) -> None:
        """The graph is about to stop; it may still run the node that was asked for."""
        ...


class GraphHook:
    """Joins one context's eval callback to an observer.

    Keep it alive as long as the context, and attach an observer before the first decode.
    """

    _observer: Observer

    def __init__(self) -> None:
        self._state = np.zeros(graph_filter.STATE_WORDS, dtype=np.int64)
        self._stop = _StopFunction(self._on_stop)
        self._state[CALLBACK] = ctypes.cast(self._stop, ctypes.c_void_p).value or 0
        self._layers: dict[bytes, int] = {}  # node name → layer
        self.fault: BaseException | None = None
        self._tap: GateTap | None = None

    @property
    def callback(self) -> int:
        """Address for `llama_context_params.cb_eval`."""
        address: int = graph_filter.compiled().address
        return address

    @property
    def user_data(self) -> int:
        """Address for `llama_context_params.cb_eval_user_data`."""
        return int(self._state.ctypes.data)

    @property
    def calls(self) -> int:
        """Calls into Python so far."""
        return int(self._state[CALLS])

    def attach(self, observer: Observer, *, tracing: bool) -> None:
        self._observer = observer
        self._state[TRACING] = tracing

    def tap_gates(self, layers: Sequence[int]) -> GateTap:
        """From now on `Observer.routed` is given the gates' inputs."""
        self._tap = GateTap(self._state, layers)
        return self._tap

    def begin(self) -> None:
        """Before a decode: no top-k has been seen, nothing has gone wrong."""
        self.fault = None
        self._state[PENDING] = self._state[ROUTED] = self._state[FAULT] = 0

    def check(self) -> None:
        """After a decode.

        Raises:
            BaseException: whatever went wrong inside it; its logits are those of an older token.
        """
        if self._state[FAULT]:
            # Without a recorded fault the callback itself was cut short: only a signal does that.
            raise self.fault or KeyboardInterrupt

    def _on_stop(self, address: int, ask: int) -> int:
        try:
            answer = self._product(address) if ask else self._stopped(address)
            self._state[ACK] = 1
            return answer
        except BaseException as error:  # see the module's docstring; without ACK the graph ends
            self.fault = error
            self._observer.faulted()
            return ask

    def _stopped(self, address: int) -> int:
        tensor = ggml.tensor_at(address)
        name = tensor.name
        if not name.startswith(TOPK_PREFIX):
            if self._tap and tensor.op == ggml.op_code("MUL_MAT"):
                self._tap.at_gate(tensor)
                return 1
            # Neither operand of the product that weighted the experts has been overwritten yet.
            self._observer.weighted(_weights(ggml.tensor_at(tensor.src[1])))
            return 1
        layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = int(name[len(TOPK_PREFIX) :])
        row = self._tap.at_topk(layer, address) if self._tap else None
        self._state[PENDING] = self._observer.routed(layer, _matrix(tensor), row)
        self._state[ROUTED] = address
        return 1

    def _product(self, address: int) -> int:
        tensor = ggml.tensor_at(address)
        weights = tensor.src[0]
        if not self._observer.streams(weights):
            return 0
        if tensor.src[2] != self._state[ROUTED]:
            raise StreamError(
                f"{tensor.name.decode()} uses experts that no top-k announced: "
                "this architecture cannot be streamed; run it with --resident"
            )
        pending = self._observer.product(weights)
        self._state[PENDING] = pending
        return int(pending)


def _weights(tensor: ggml.Tensor) -> npt.NDArray[np.float32]:
    """A float32 tensor of ggml shape (1, top-k, rows), as a copy (rows, top-k)."""
    slots, rows, slot_stride, row_stride = tensor.ne[1], tensor.ne[2], tensor.nb[1], tensor.nb[2]
    if not rows:
        return np.empty((0, slots), np.float32)
    length = row_stride * (rows - 1) + slot_stride * (slots - 1) + 4
    memory: Any = (ctypes.c_char * length).from_address(tensor.data)
    strides = (row_stride, slot_stride)
    weights: npt.NDArray[np.float32] = np.ndarray((rows, slots), np.float32, memory, 0, strides)
    return np.array(weights)


def _matrix(tensor: ggml.Tensor) -> npt.NDArray[np.int32]:
    """An int32 tensor of up to two dimensions, in place. Rows may lie apart: the top-k is a view
    of the argsort. There are none where the last layer of a ubatch has no output to give."""
    columns, rows, stride = tensor.ne[0], tensor.ne[1], tensor.nb[1]
    if not rows:
        return np.empty((0, columns), np.int32)
    memory: Any = (ctypes.c_char * (stride * (rows - 1) + 4 * columns)).from_address(tensor.data)
    ids: npt.NDArray[np.int32] = np.ndarray((rows, columns), np.int32, memory, strides=(stride, 4))
    return ids
