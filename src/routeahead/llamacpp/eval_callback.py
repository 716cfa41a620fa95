"""The Python half of the eval callback: reads tensors, and passes plain numbers on.

Order of events in a layer, as llama.cpp runs it:

1. `ffn_moe_topk-L` was computed → `Observer.routed(layer, ids, hidden)`.
2. Under dropping, the last node of the layer's weights was computed →
   `Observer.final_weights(weights)`. Which node that is differs between architectures: it is what
   `ffn_moe_weighted-L` multiplies the experts' outputs by. The first graph shows it; until then,
   and where it is computed after the first product, nothing is dropped.
3. A product over experts (MUL_MAT_ID) is *about to run*, while reads are pending →
   `Observer.product(...)` must return only once its bytes are there. Whether more products of the
   layer have reads pending decides if the graph stops after this one; otherwise llama.cpp would
   ask for the next product before this one has run, and nothing would overlap.

An exception must not cross into C, where ctypes would drop it and the decode would go on with
whatever is in memory. It is kept in `fault`; the filter ends the graph; `check` raises it.

Where layers lie on a device (`attach`), their values are copied from there, and what an observer
writes is copied back at the end of the stop. *Late*: if nobody wants to change routings, a device's
top-k is not stopped at, so that the device may compute it together with what follows (then the
result is that of an uninterrupted run to the last bit); the first product of the layer reads the
copy of the ids that the scheduler made for the CPU (`tensor_values`).

Batches are announced with `begin`, by `Llama`; but clients also call `llama_decode` themselves. The
first top-k of a graph that nobody announced is reported to `unannounced`.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from routeahead.errors import StreamError
from routeahead.llamacpp import ggml, node_filter
from routeahead.llamacpp.node_filter import (
    ACK,
    ANNOUNCED,
    CALLBACK,
    CALLS,
    FAULT,
    IS_HOST,
    LATE,
    MAX_POINTED,
    NAME_WORDS,
    NORM,
    NORM_PREFIX,
    PENDING,
    PLACED,
    POINTED,
    RESTED,
    RESTING,
    ROUTED,
    SETTLED,
    SETTLED_WIDTH,
    SLOTS_BEGIN,
    SLOTS_END,
    TOPK_PREFIX,
    TRACING,
    VOID,
    WEIGHTS,
    WEIGHTS_MASK,
)
from routeahead.llamacpp.router_graph import gathers, strip_views, weights_gathered
from routeahead.llamacpp.router_input import RouterInput
from routeahead.llamacpp.slot_ids import SlotIds
from routeahead.llamacpp.tensor_values import GraphValues, on_host, original_name
from routeahead.types import Floats, Ids

_WEIGHTED_PREFIX = b"ffn_moe_weighted"
_WEIGHTS_PREFIX = b"ffn_moe_weights"

_NO_LAYER = 1 << 30  # any layer is the first after it

_StopFunction = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p, ctypes.c_int8)


class Observer(Protocol):
    """Who decides what happens at a stop. Called on the evaluation thread."""

    def routed(self, layer: int, ids: Ids, hidden: Floats | None) -> bool:
        """`ids` (rows, top-k) of `layer`, in the graph's own memory: a write changes the routing.

        `hidden` is the router's input (rows, width), in memory that this call may read: None unless
        `router_input` was called and it could be read.

        Returns whether products of this layer must be announced to `product`.
        """
        ...

    def before_attention(self, layer: int, hidden: Floats) -> None:
        """`hidden` (rows, width) is what the attention of `layer` is about to be given, in memory
        that this call may read. Only if `RouterInput.begin` was told so."""
        ...

    def streams(self, tensor: int) -> bool:
        """Whether the weight tensor at address `tensor` is read from disk."""
        ...

    def product(self, tensor: int) -> bool:
        """A product with the weight tensor at address `tensor` is about to run.

        Returns whether a later product of the layer still has reads pending.
        """
        ...

    @property
    def holding(self) -> bool:
        """Whether the last routing waits for its final weights."""
        ...

    def final_weights(self, weights: Floats) -> bool:
        """The final weights (rows, top-k) that a routing waits for, in the graph's own memory: a
        write changes them.

        Returns whether products of this layer must be announced to `product`.
        """
        ...

    def log_weights(self, weights: Floats) -> None:
        """The weights (rows, top-k) that the last routing got; only called while tracing."""
        ...

    def faulted(self) -> None:
        """The graph is about to stop; it may still run the node that was asked for."""
        ...


class EvalCallback:
    """Joins one context's eval callback to an observer.

    Keep it alive as long as the context, and attach an observer before the first decode.

    Attributes:
        fault: the exception of the last batch that failed.
        ranked_for: the layer whose experts the last top-k has ranked, if its layer's router was
            lent; None if it has ranked its own.
    """

    _observer: Observer
    _unannounced: Callable[[int], None]

    def __init__(self) -> None:
        self._state = np.zeros(node_filter.STATE_WORDS, dtype=np.int64)
        self._stop = _StopFunction(self._on_stop)
        self._state[CALLBACK] = ctypes.cast(self._stop, ctypes.c_void_p).value or 0
        self._layers: dict[bytes, int] = {}  # node name → layer
        self._routing: set[int] = set()  # addresses of top-k tensors known to route
        self._idle_topk = False  # some top-k routes nothing
        self._slot_ids = SlotIds(self._state)
        self._gathered: dict[int, int] = {}  # top-k → the node that gathers its weights
        self.fault: BaseException | None = None
        self.ranked_for: int | None = None
        self._layer = _NO_LAYER  # the last one that was routed in an unannounced batch
        self._input: RouterInput | None = None
        self._topk = 0  # address of the last top-k
        self._tracing = False
        self._values = GraphValues()
        self._unweighed: set[int] = set()  # layers whose last weights node is not known yet
        self._weights: dict[int, npt.NDArray[np.int64]] = {}  # `_name_words` of the others'

    @property
    def function(self) -> int:
        """Address for `llama_context_params.cb_eval`."""
        address: int = node_filter.compiled().address
        return address

    @property
    def user_data(self) -> int:
        """Address for the user data of both callbacks."""
        return int(self._state.ctypes.data)

    @property
    def abort_function(self) -> int:
        """Address for `llama_context_params.abort_callback`."""
        address: int = node_filter.abort_check().address
        return address

    @property
    def calls(self) -> int:
        """Calls into Python so far."""
        return int(self._state[CALLS])

    def attach(
        self,
        observer: Observer,
        *,
        unannounced: Callable[[int], None],
        tracing: bool,
        weighing: Collection[int] = (),
        offloaded: bool = False,
        late: bool = False,
    ) -> None:
        """
        Reports to `observer` from now on.

        Args:
            unannounced: is given the rows of the first layer of each graph without a `begin`.
            tracing: call `Observer.log_weights`.
            weighing: layers whose routings may wait for their final weights.
            offloaded: some layers lie on a device.
            late: nobody wants to change a routing, nor to see more of it than the ids.
        """
        self._values.offloaded = offloaded
        if offloaded:
            is_host = ggml.library().ggml_backend_buffer_is_host
            self._state[IS_HOST] = ctypes.cast(is_host, ctypes.c_void_p).value or 0
            self._state[LATE] = late
        self._observer, self._unannounced, self._tracing = observer, unannounced, tracing
        self._unweighed = set(weighing)
        self._state[TRACING] = tracing or bool(weighing)

    def router_input(self, layers: Sequence[int]) -> RouterInput:
        """From the first call on, `Observer.routed` is given hidden vectors."""
        if self._input is None:
            self._input = RouterInput(self._state, layers)
        return self._input

    def serve_slots(self, begin: int, end: int) -> None:
        """Products over weights whose data lie in this range of addresses are given the slots of
        the experts, and not the experts."""
        self._state[SLOTS_BEGIN], self._state[SLOTS_END] = begin, end

    def rest(self, settled: npt.NDArray[np.bool_]) -> None:
        """For this batch, routings to experts that are `settled` (layers, n_expert) need nobody; if
        all are, the graph does not even stop.

        Not for batches that nobody announced, because they are noticed at a stop, and not if some
        top-k routes nothing, because the filter cannot tell those apart.
        """
        if not self._state[ANNOUNCED] or self._idle_topk:
            return
        self._state[SETTLED] = settled.ctypes.data
        self._state[SETTLED_WIDTH] = settled.shape[1]
        self._state[RESTING] = settled.all()
        self._settled = settled  # keeps it alive

    def use_slots(self, slots: Ids) -> None:
        """`slots` (rows, top-k) are those of the experts of the routing that is being handled.

        Nothing still reads the former routing's: the graph runs a layer's products before the next
        layer's top-k, which the stop came after.
        """
        self._slot_ids.show(slots)

    @property
    def rested(self) -> int:
        """Experts that rows of this batch were routed to without a call to the observer."""
        return int(self._state[RESTED])

    def selection_scores(self) -> Floats | None:
        """(rows, n_expert), what the last top-k ranked the experts by; valid at its stop only.

        None if it ranked nothing: a table gave each token its experts. Nor are they given if the
        layer's router was lent.
        """
        if self.ranked_for is not None:
            return None
        node = strip_views(ggml.tensor_at(self._topk))
        if ggml.op_name(node) != "ARGSORT":
            return None
        return self._values.floats(ggml.tensor_at(node.src[0]))

    def probabilities(self) -> Floats | None:
        """(rows, n_expert), what the last top-k's weights are gathered from, in the graph's own
        memory: a write at its stop changes them. None if that is not found."""
        gathered = self._gathered.get(self._topk)
        if not gathered or not gathers(gathered, self._topk):  # another graph
            gathered = self._gathered[self._topk] = weights_gathered(self._topk)
        if not gathered:
            return None
        return self._values.weights(ggml.tensor_at(int(ggml.tensor_at(gathered).src[0])))

    def begin(self) -> None:
        """Announces a batch: no top-k has been seen, nothing has gone wrong."""
        self.forget()
        self._state[ANNOUNCED] = 1
        self._state[PENDING] = self._state[ROUTED] = self._state[WEIGHTS] = self._state[RESTED] = 0

    @property
    def void(self) -> bool:
        """Whether a batch failed and `check` has not raised why."""
        return bool(self._state[VOID] or self._state[FAULT])

    def check(self) -> None:
        """After a batch, announced or not.

        Raises:
            BaseException: whatever went wrong inside it; its logits are those of an older token.
        """
        self._end()
        if self.void:
            # Without a recorded fault the callback itself was cut short: only a signal does that.
            fault = self.fault or KeyboardInterrupt()
            self.forget()
            raise fault

    def forget(self) -> None:
        """Whatever batch there was is over, and whatever went wrong in it is known."""
        self._end()
        self.fault, self._layer = None, _NO_LAYER
        self._state[FAULT] = self._state[VOID] = 0

    def _end(self) -> None:
        """The batch is over: no later one may rest because this one did."""
        self._slot_ids.point_back()
        if self._input:
            self._input.lending.end()
        self._state[NORM] = 0  # what comes next may be a batch that nobody announces
        self._state[ANNOUNCED] = self._state[SETTLED] = self._state[RESTING] = 0

    def _on_stop(self, address: int, ask: int) -> int:
        try:
            answer = self._product(address) if ask else self._stopped(address)
            self._state[ACK] = 1
            return answer
        except BaseException as error:  # see the module's docstring; without ACK the graph ends
            self.fault = error
            self._observer.faulted()
            return 1

    def _stopped(self, address: int) -> int:
        tensor = ggml.tensor_at(address)
        name = tensor.name
        if name.startswith(TOPK_PREFIX):
            self._at_topk(name, tensor, address)
        elif name.startswith(_WEIGHTED_PREFIX):
            self._at_weighted(name, tensor)
        elif self._input and name.startswith(NORM_PREFIX):
            self._observer.before_attention(layer_of(name), self._input.at_norm(tensor))
        elif self._input and tensor.op == ggml.op_code("MUL_MAT"):
            self._input.at_router(tensor)
        else:
            self._state[WEIGHTS] = 0
            self._state[PENDING] = self._observer.final_weights(self._values.weights(tensor))
        self._values.write()
        return 1

    def _at_topk(self, name: bytes, tensor: ggml.Tensor, address: int) -> None:
        if address not in self._routing and not self._routes(address):
            return
        self._route(name, tensor, address)

    def _route(self, name: bytes, tensor: ggml.Tensor, address: int) -> None:
        """The ids of the top-k of that name are in the tensor at `address`, itself or a copy."""
        self._values.begin()
        layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = layer_of(name)
        self._topk = address
        if not self._state[ANNOUNCED]:
            self._at_unannounced(layer, tensor.ne[1])
        hidden = self._input.at_topk(layer, address, tensor.ne[1]) if self._input else None
        self.ranked_for = self._input.lending.at_topk() if self._input else None
        self._state[PLACED] = 0
        self._state[PENDING] = self._observer.routed(layer, self._values.ids(tensor), hidden)
        if layer in self._weights and self._observer.holding:
            self._state[WEIGHTS : WEIGHTS_MASK + NAME_WORDS] = self._weights[layer]
        self._state[ROUTED] = address

    def _routes(self, topk: int) -> bool:
        """Whether a streamed product takes its experts from the tensor at `topk`.

        Layers may choose a second time, for experts that are resident (grovemoe), and a copy of
        a top-k is named like it. What is made next of all streamed products tells.
        """
        product = ggml.op_code("MUL_MAT_ID")
        for address in ggml.tensors_after(topk):
            node = ggml.tensor_at(address)
            if node.op == product and self._observer.streams(node.src[0]):
                if self._shows(node.src[2], topk):
                    if not self._idle_topk:  # else another graph may have one at this address
                        self._routing.add(topk)
                    return True
                break
        self._idle_topk = True
        self._routing.clear()
        return False

    def _shows(self, ids: int, topk: int) -> bool:
        """Whether the tensor at `ids` is the top-k, or a copy of it for another device. Copies live
        in memory that the scheduler uses again for each graph, so it is their name that tells."""
        if ids == topk or not topk:
            return ids == topk
        name: bytes = ggml.tensor_at(ids).name if self._values.offloaded else b""
        original: bytes = ggml.tensor_at(topk).name
        return name != original_name(name) == original

    def _at_unannounced(self, layer: int, rows: int) -> None:
        """`rows` are routed in a graph that nobody announced: does it begin here?"""
        if layer <= self._layer or self.void:
            self._unannounced(rows)
            self.forget()
        self._layer = layer

    def _at_weighted(self, name: bytes, tensor: ggml.Tensor) -> None:
        """Neither operand of the product that weighted the experts has been overwritten yet."""
        weights = ggml.tensor_at(tensor.src[1])
        if self._tracing:
            self._observer.log_weights(self._values.weights(weights))
        if self._unweighed:
            self._learn_weights(layer_of(name), original_name(weights.name))

    def _learn_weights(self, layer: int, name: bytes) -> None:
        """`name` is that of the layer's last weights node, in this graph and in those to come,
        unless it is one that ggml makes up by counting nodes."""
        if layer in self._unweighed:
            self._unweighed.discard(layer)
            if name.startswith(_WEIGHTS_PREFIX):
                self._weights[layer] = _name_words(name)
            else:
                warnings.warn(
                    f"layer {layer} does not show where its experts' weights are final: nothing "
                    "is dropped from it",
                    stacklevel=2,
                )
        self._state[TRACING] = self._tracing or bool(self._unweighed)

    def _product(self, address: int) -> int:
        tensor = ggml.tensor_at(address)
        weights = tensor.src[0]
        if not self._observer.streams(weights):
            return 0
        if self._values.offloaded and tensor.src[2] != self._state[ROUTED]:
            self._at_copy(int(tensor.src[2]))
        if tensor.src[2] != self._state[ROUTED] or self._state[POINTED] == MAX_POINTED:
            raise StreamError(
                f"{tensor.name.decode()} uses experts that no top-k announced: "
                "this architecture cannot be streamed; run it with --resident"
            )
        pending = self._state[PENDING] != 0 and self._observer.product(weights)
        if self._state[SLOTS_END] and not self._state[PLACED]:
            raise StreamError(f"{tensor.name.decode()} runs before its experts have slots")
        self._state[PENDING] = pending
        return int(pending)

    def _at_copy(self, ids: int) -> None:
        """The first product of a layer whose top-k was computed on a device is about to run. The
        inputs of its split were copied before the split's first node was asked for."""
        if self._shows(ids, int(self._state[ROUTED])):  # there was a stop at the top-k
            self._state[ROUTED] = ids
        elif self._state[LATE] and not self._state[ROUTED]:
            copy = ggml.tensor_at(ids)
            name = original_name(copy.name)
            if name.startswith(TOPK_PREFIX) and name != copy.name and on_host(copy):
                self._route(name, copy, ids)


def layer_of(name: bytes) -> int:
    """7 of "ffn_moe_topk-7", or of "ffn_moe_topk-7 (copy)"."""
    return int(name.rpartition(b"-")[2].partition(b" ")[0])


def _name_words(name: bytes) -> npt.NDArray[np.int64]:
    """A node's name and the mask of what it fills, as WEIGHTS and WEIGHTS_MASK have them."""
    size = 8 * NAME_WORDS
    ended = (name + b"\0")[:size]
    mask = b"\xff" * len(ended)
    return np.frombuffer(ended.ljust(size, b"\0") + mask.ljust(size, b"\0"), np.int64)
