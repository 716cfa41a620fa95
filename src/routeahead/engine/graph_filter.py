"""The native half of the eval callback.

llama.cpp asks for every node of the graph whether it should stop there: hundreds of times a token.
Asked in Python, that would take the GIL as often, and one busy thread beside it would make each
take wait. So the question is answered here in machine code (numba), and Python runs only where
there is something to decide:

* after a layer's top-k was computed: its experts are known;
* before a product over experts whose bytes are still being read;
* for a trace, after the experts' outputs were weighted.

The filter is also the gate against the worst bug, a token computed from bytes that had not
arrived: a product over experts whose ids are not those of the last top-k that Python has handled,
or a Python call that did not come back, raises FAULT, and the graph stops at the next node.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from routeahead.engine import ggml

# Words of the state that the filter and Python share. One thread runs both, in turn.
CALLBACK = 0  # address of Python's entry
PENDING = 1  # a layer's reads are in flight: Python wants to see its products
ROUTED = 2  # address of the last top-k tensor that Python has handled
ACK = 3  # set by Python as its last act; still 0 means that it was interrupted
FAULT = 4  # the result of this graph is void; stop as soon as possible
CALLS = 5  # calls into Python so far
TRACING = 6  # somebody wants to see the weights of each routing
STATE_WORDS = 8

_MUL, _MUL_MAT_ID = ggml.op_code("MUL"), ggml.op_code("MUL_MAT_ID")
_OP_WORD = ggml.Tensor.op.offset // 8
_IDS_WORD = ggml.Tensor.src.offset // 8 + 2
_NAME_WORD = ggml.Tensor.name.offset // 8
TOPK_PREFIX = b"ffn_moe_topk-"
_PREFIX = int.from_bytes(TOPK_PREFIX[:8], "little")
_TOPK_TAIL = int.from_bytes(TOPK_PREFIX[8:], "little")
_TOPK_MASK = (1 << 8 * len(TOPK_PREFIX[8:])) - 1
_WEIGHTED = int.from_bytes(b"weighted", "little")
_TENSOR_WORDS = ggml.Tensor.name.offset // 8 + 8


@intrinsic
def _call(_typing: Any, address: Any, tensor: Any, ask: Any) -> Any:
    """Calls the C function `int8 (void *tensor, int8 ask)` at an address known at run time."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte, pointer = ir.IntType(8), ir.IntType(8).as_pointer()
        function = ir.FunctionType(byte, [pointer, byte])
        target = builder.inttoptr(arguments[0], function.as_pointer())
        return builder.call(target, [arguments[1], arguments[2]])

    return types.int8(types.int64, types.voidptr, types.int8), generate


@functools.cache
def compiled() -> Any:
    """The filter as a numba cfunc `bool (ggml_tensor *, bool ask, int64 *state)`."""

    @numba.cfunc(types.boolean(types.voidptr, types.boolean, types.voidptr))
    def graph_filter(tensor: Any, ask: Any, state_pointer: Any) -> Any:
        state = carray(state_pointer, (STATE_WORDS,), dtype=np.int64)
        if state[FAULT] != 0:
            return ask  # asked: stop here; stopped: end the graph
        words = carray(tensor, (_TENSOR_WORDS,), dtype=np.int64)
        op, first, second = words[_OP_WORD] & 0xFFFFFFFF, words[_NAME_WORD], words[_NAME_WORD + 1]
        if op == _MUL_MAT_ID:
            if not ask:
                return True  # the stop was for what comes next
            if state[PENDING] == 0 and words[_IDS_WORD] == state[ROUTED]:
                return False
        elif ask:
            topk = second & _TOPK_MASK == _TOPK_TAIL
            weighted = state[TRACING] != 0 and op == _MUL and second == _WEIGHTED
            return first == _PREFIX and (topk or weighted)
        state[ACK] = 0
        state[CALLS] += 1
        answer: Any = _call(state[CALLBACK], tensor, types.int8(ask))  # type: ignore[call-arg]
        if state[ACK] == 0:
            state[FAULT] = 1
            return ask
        return answer != 0

    return graph_filter
