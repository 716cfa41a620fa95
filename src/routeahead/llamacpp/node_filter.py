"""The native half of the eval callback.

llama.cpp asks for every node of the graph whether it should stop there: hundreds of times a token.
Asked in Python, that would take the GIL as often, and one busy thread beside it would make each
take wait. So the question is answered here in machine code (numba), and Python runs only where
there is something to decide:

* after a layer's top-k was computed: its experts are known (unless all experts fit in memory, these
  have been there before, and nobody else wants to know, or it is on a device: see `copies`);
* before a product over experts whose bytes are still being read;
* for a trace, after the experts' outputs were weighted;
* for predictions, after a router product whose input does not survive until the top-k, or when the
  input of a layer's attention has been normalised;
* under dropping, after the last node of a layer's weights, which are final then.

The filter is also the gate against the worst bug, a token computed from bytes that had not
arrived: a product over experts whose ids are not those of the last top-k that Python has handled,
or a Python call that did not come back, raises FAULT, and the graph ends after the next node.

llama.cpp does not tell its caller that a graph ended early, so who announces a batch checks FAULT
after it. Other batches are ended by `abort_check` instead: then `llama_decode` itself returns 2.
That also turns FAULT into VOID, so that the next graph starts clean.

Experts live in slots, and products must be given slot numbers where the graph has expert numbers.
Others read the same ids, before and after (weights, biases, scales): so the ids stay as they are,
and each product over streamed experts is pointed at a tensor of slot numbers, which Python fills
in, when llama.cpp asks about it, which is before it runs. At the next stop it has run, and gets its
own ids back: llama.cpp uses a graph again, and the check above is made anew.

For predictions it also proves that a router's input can be read at the top-k: ROUTER is the
router matrix of the next layer; when its product is asked for, the input's address range is noted,
and every later node of the layer that would write into that range sets DAMAGED. llama.cpp asks for
all nodes up to a stop before it runs the first of them, so the proof is complete at the top-k.

A layer's router may be *lent* to a later layer: its product, and what biases it, are pointed at the
later layer's tensors in the same way as the products above, so that the ranking is the later
layer's. No tensor of the model is written to: other contexts, and graphs that are not told to lend,
never see it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from routeahead.llamacpp import ggml
from routeahead.llamacpp.native_code import address_of, call, call_is_host, pointer
from routeahead.machine_code import machine_code

# Words of the state that the filter and Python share. One thread runs both, in turn.
CALLBACK = 0  # address of Python's entry
PENDING = 1  # a layer's reads are in flight: Python wants to see its products
ROUTED = 2  # address of the last top-k tensor that Python has handled
ACK = 3  # set by Python as its last act; still 0 means that it was interrupted
FAULT = 4  # the result of this graph is void; stop as soon as possible
CALLS = 5  # calls into Python so far
TRACING = 6  # somebody wants to see the weights of each routing
ROUTER = 7  # address of the next layer's router matrix tensor; 0: nobody wants its input
ROUTER_INPUT = 8  # where that product's input begins; 0: the product has not been asked for
ROUTER_INPUT_END = 9  # and where it ends
DAMAGED = 10  # a node after the product writes into it
STOP_AT_ROUTER = 11  # stop after the router product, because the top-k is too late
WEIGHTS = 12  # name of the layer's last weights node, as many words as a name has; 0: not wanted
WEIGHTS_MASK = 20  # masks what may stand behind the end of that name, word by word
ANNOUNCED = 28  # somebody checks FAULT after this batch
VOID = 29  # a graph was aborted because of FAULT, and nobody has been told why
SLOT_IDS = 30  # address of the tensor of slot numbers
SLOTS_BEGIN = 31  # tensors whose data lie between these addresses are read by slot
SLOTS_END = 32
PLACED = 33  # the slot numbers are those of the last top-k that Python has handled
SETTLED = 34  # bytes (layer, expert): it is in memory for good; 0: Python wants every routing
SETTLED_WIDTH = 35  # experts of a layer there
RESTING = 36  # all are: the graph need not stop
RESTED = 37  # experts that rows were routed to without a call into Python
POINTED = 38  # products that are pointed at the slot numbers
PRODUCTS = 39  # their addresses
MAX_POINTED = 8
LENT = PRODUCTS + MAX_POINTED  # operands of the next layer's router that were exchanged
OPERANDS = 3  # of a router: its matrix, the bias before and the bias after the activation
LENT_FROM = LENT + 1  # addresses of those tensors; 0: there is none, or the router is not lent
LENT_TO = LENT_FROM + OPERANDS  # of those that take their place
LENT_AT = LENT_TO + OPERANDS  # of the nodes that have these operands now; 0: none
IS_HOST = LENT_AT + OPERANDS  # address of ggml_backend_buffer_is_host; 0: all is in host memory
LATE = IS_HOST + 1  # a device's top-k is not stopped at: its copy is read when a product asks
ROUTER_INPUT_TENSOR = LATE + 1  # whose data the router's input is
ROUTER_INPUT_BUFFER = LATE + 2  # addresses of other buffers are not to be compared with its
NORM = LATE + 3  # second word of the name of the next layer's pre-attention norm; 0: not wanted
NORM_MASK = LATE + 4  # masks what may stand behind its end
STATE_WORDS = LATE + 5

_ADD, _MUL, _MUL_MAT, _MUL_MAT_ID = (
    ggml.op_code(name) for name in ("ADD", "MUL", "MUL_MAT", "MUL_MAT_ID")
)
_VIEW, _RESHAPE, _PERMUTE, _TRANSPOSE = (
    ggml.op_code(name) for name in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
)
_OP_WORD = ggml.Tensor.op.offset // 8
_SRC_WORD = ggml.Tensor.src.offset // 8
_IDS_WORD = _SRC_WORD + 2
_NE_WORD, _NB_WORD = ggml.Tensor.ne.offset // 8, ggml.Tensor.nb.offset // 8
_BUFFER_WORD = ggml.Tensor.buffer.offset // 8
_DATA_WORD = ggml.Tensor.data.offset // 8
_NAME_WORD = ggml.Tensor.name.offset // 8
TOPK_PREFIX = b"ffn_moe_topk-"
_PREFIX = int.from_bytes(TOPK_PREFIX[:8], "little")
_TOPK_TAIL = int.from_bytes(TOPK_PREFIX[8:], "little")
_TOPK_MASK = (1 << 8 * len(TOPK_PREFIX[8:])) - 1
_COPIED_NAME = b"CPU#" + TOPK_PREFIX  # of the copy that the scheduler makes of a device's top-k
_COPIED = tuple(
    int.from_bytes(_COPIED_NAME[at : at + 8], "little") for at in range(0, len(_COPIED_NAME), 8)
)
_COPIED_MASKS = (*[-1] * (len(_COPIED) - 1), (1 << 8 * (len(_COPIED_NAME) % 8)) - 1)
_WEIGHTED = int.from_bytes(b"weighted", "little")
NORM_PREFIX = b"attn_norm-"
_NORM = int.from_bytes(NORM_PREFIX[:8], "little")
NAME_WORDS = 8
_TENSOR_WORDS = _NAME_WORD + NAME_WORDS


@numba.njit
def _end(words: Any) -> Any:
    """One past the last byte of a tensor's data, wherever its rows lie."""
    end = words[_DATA_WORD] + words[_NB_WORD]
    for axis in range(ggml.MAX_DIMS):
        end += (words[_NE_WORD + axis] - 1) * words[_NB_WORD + axis]
    return end


@numba.njit
def _watch_router(state: Any, words: Any, op: Any) -> Any:
    """Asked for a node while a router's input is wanted: whether to stop after it."""
    if op == _MUL_MAT and words[_SRC_WORD] == state[ROUTER]:
        source = carray(pointer(words[_SRC_WORD + 1]), (_TENSOR_WORDS,), dtype=np.int64)  # type: ignore[call-arg]
        state[ROUTER_INPUT], state[ROUTER_INPUT_END] = source[_DATA_WORD], _end(source)
        state[ROUTER_INPUT_TENSOR] = words[_SRC_WORD + 1]
        state[ROUTER_INPUT_BUFFER] = source[_BUFFER_WORD]
        state[DAMAGED] = 0
        return state[STOP_AT_ROUTER] != 0
    if state[ROUTER_INPUT] != 0:
        view = op == _VIEW or op == _RESHAPE or op == _PERMUTE or op == _TRANSPOSE  # noqa: PLR1714
        if (
            not view
            and words[_BUFFER_WORD] == state[ROUTER_INPUT_BUFFER]
            and words[_DATA_WORD] < state[ROUTER_INPUT_END]
            and _end(words) > state[ROUTER_INPUT]
        ):
            state[DAMAGED] = 1
    return False


@numba.njit
def _ends_weights(state: Any, words: Any) -> Any:
    """Whether this is the node whose name Python wrote into the state."""
    for word in range(NAME_WORDS):
        if words[_NAME_WORD + word] & state[WEIGHTS_MASK + word] != state[WEIGHTS + word]:
            return False
    return True


@numba.njit
def _point_at_slots(state: Any, tensor: Any, words: Any) -> Any:
    """Asked about a product whose ids are those of the last top-k that Python has handled."""
    weights = carray(pointer(words[_SRC_WORD]), (_TENSOR_WORDS,), dtype=np.int64)  # type: ignore[call-arg]
    if state[SLOTS_BEGIN] <= weights[_DATA_WORD] < state[SLOTS_END]:
        words[_IDS_WORD] = state[SLOT_IDS]
        state[PRODUCTS + state[POINTED]] = address_of(tensor)
        state[POINTED] += 1


@numba.njit
def _point_back(state: Any) -> Any:
    """The products have run. A graph that was built anew in their memory is left alone."""
    for index in range(state[POINTED]):
        words = carray(pointer(state[PRODUCTS + index]), (_TENSOR_WORDS,), dtype=np.int64)  # type: ignore[call-arg]
        if words[_IDS_WORD] == state[SLOT_IDS]:
            words[_IDS_WORD] = state[ROUTED]
    state[POINTED] = 0


@numba.njit
def _operand_word(operand: Any) -> Any:
    """Where a node has it: the matrix is its first source, a bias the second."""
    return _SRC_WORD if operand == 0 else _SRC_WORD + 1


@numba.njit
def _lend(state: Any, tensor: Any, words: Any, op: Any) -> Any:
    """Asked about a node while the next layer's router is lent."""
    for operand in range(OPERANDS):
        fits = op == _MUL_MAT if operand == 0 else op == _ADD
        word = _operand_word(operand)
        if fits and state[LENT_FROM + operand] != 0 and words[word] == state[LENT_FROM + operand]:
            words[word] = state[LENT_TO + operand]
            state[LENT_AT + operand] = address_of(tensor)  # type: ignore[call-arg]
            state[LENT] += 1


@numba.njit
def _give_back(state: Any) -> Any:
    """The router has run, or never will. As `_point_back`."""
    for operand in range(OPERANDS):
        if state[LENT_AT + operand] != 0:
            words = carray(pointer(state[LENT_AT + operand]), (_TENSOR_WORDS,), dtype=np.int64)  # type: ignore[call-arg]
            word = _operand_word(operand)
            if words[word] == state[LENT_TO + operand]:
                words[word] = state[LENT_FROM + operand]
            state[LENT_AT + operand] = 0


@numba.njit
def _is_settled(state: Any, words: Any, start: Any) -> Any:
    """Whether all experts of this top-k, whose name has its layer from byte `start` on, are in
    memory for good."""
    layer = 0
    for place in range(start, start + 3):
        digit = (words[_NAME_WORD + place // 8] >> 8 * (place % 8) & 0xFF) - 48
        if digit < 0 or digit > 9:
            break
        layer = 10 * layer + digit
    settled = state[SETTLED] + layer * state[SETTLED_WIDTH]
    for row in range(words[_NE_WORD + 1]):
        address = words[_DATA_WORD] + row * words[_NB_WORD + 1]
        ids = carray(pointer(address), (words[_NE_WORD],), dtype=np.int32)  # type: ignore[call-arg]
        for slot in range(words[_NE_WORD]):
            if carray(pointer(settled + ids[slot]), (1,), dtype=np.int8)[0] == 0:
                return False
    return True


@numba.njit
def _look_up_copy(state: Any, address: Any) -> Any:
    """The first product of a layer takes its experts from the copy of a device's top-k: what
    `_stopped` does where there is a stop."""
    ids = carray(pointer(address), (_TENSOR_WORDS,), dtype=np.int64)  # type: ignore[call-arg]
    for word in range(len(_COPIED)):
        if ids[_NAME_WORD + word] & _COPIED_MASKS[word] != _COPIED[word]:
            return
    if _is_settled(state, ids, len(_COPIED_NAME)):
        state[RESTED] += ids[_NE_WORD] * ids[_NE_WORD + 1]
        state[ROUTED], state[PENDING] = address, 0


@numba.njit
def _on_device(state: Any, words: Any) -> Any:
    """Whether the CPU cannot read a tensor's data."""
    if state[IS_HOST] == 0 or words[_BUFFER_WORD] == 0:
        return False
    host: Any = call_is_host(state[IS_HOST], words[_BUFFER_WORD])  # type: ignore[call-arg]
    return not host


@numba.njit
def _disarm(state: Any, words: Any) -> Any:
    """Asked about a product of a void graph. With devices, a graph is several splits; ending one
    does not end the others, of which llama.cpp still runs the first node, with whatever is in
    memory as ids. Every model has an expert 0."""
    ids = carray(pointer(words[_IDS_WORD]), (_TENSOR_WORDS,), dtype=np.int64)  # type: ignore[call-arg]
    if ids[_BUFFER_WORD] == 0 or _on_device(state, ids):
        return
    for row in range(ids[_NE_WORD + 1]):
        address = ids[_DATA_WORD] + row * ids[_NB_WORD + 1]
        carray(pointer(address), (ids[_NE_WORD],), dtype=np.int32)[:] = 0


_TO_PYTHON = -1


@numba.njit
def _asked(state: Any, tensor: Any, words: Any, op: Any) -> Any:
    """Whether to stop after the node, 0 or 1, or that Python must say so."""
    first, second = words[_NAME_WORD], words[_NAME_WORD + 1]
    topk = first == _PREFIX and second & _TOPK_MASK == _TOPK_TAIL
    if state[RESTING] != 0:
        if topk:
            state[RESTED] += words[_NE_WORD] * words[_NE_WORD + 1]
        return 0
    if op == _MUL_MAT_ID:
        if state[LATE] != 0 and state[ROUTED] == 0 and state[SETTLED] != 0:
            _look_up_copy(state, words[_IDS_WORD])
        known = words[_IDS_WORD] == state[ROUTED] and state[POINTED] < MAX_POINTED
        placed = state[PLACED] != 0 or state[SLOTS_END] == 0
        if state[PENDING] != 0 or not known or not placed:
            return _TO_PYTHON
        _point_at_slots(state, tensor, words)
        return 0
    if topk and state[LATE] != 0 and _on_device(state, words):
        # Earlier splits have run, so the products of the layer before have; and what was routed
        # before this is not what the next products use, although their copy may have its address.
        _point_back(state)
        state[ROUTED] = 0
        topk = False
    weighted = state[TRACING] != 0 and op == _MUL and first == _PREFIX and second == _WEIGHTED
    at_router = state[ROUTER] != 0 and _watch_router(state, words, op)
    if state[LENT_FROM] != 0:
        _lend(state, tensor, words, op)
    weighed = state[WEIGHTS] != 0 and _ends_weights(state, words)
    normed = state[NORM] != 0 and first == _NORM and second & state[NORM_MASK] == state[NORM]
    return 1 if at_router or weighed or topk or weighted or normed else 0


@numba.njit
def _stopped(state: Any, tensor: Any, words: Any, op: Any) -> Any:
    """Whether to go on after the stop, 0 or 1, or that Python must say so."""
    _point_back(state)
    _give_back(state)
    if op == _MUL_MAT_ID:
        return 1  # the stop was for what comes next
    topk = words[_NAME_WORD] == _PREFIX and words[_NAME_WORD + 1] & _TOPK_MASK == _TOPK_TAIL
    if topk and state[SETTLED] != 0 and _is_settled(state, words, len(TOPK_PREFIX)):
        state[RESTED] += words[_NE_WORD] * words[_NE_WORD + 1]
        state[ROUTED], state[PENDING] = address_of(tensor), 0  # type: ignore[call-arg]
        return 1
    return _TO_PYTHON


@functools.cache
def compiled() -> Any:
    """The filter as a numba cfunc `bool (ggml_tensor *, bool ask, int64 *state)`.

    Raises:
        SettingsError: numba was told not to compile.
    """
    signature = types.boolean(types.voidptr, types.boolean, types.voidptr)
    return machine_code(signature, _filter(_frozen()))


def _frozen() -> int:
    """A digest of everything that the machine code may have in it.

    numba's cache notices when this file changes, but not that another library has other op codes
    or another struct, nor that a function which is used here changed in another file. So all plain
    values of both modules are taken, whether they are used or not, and all files of this folder.
    """
    values = [
        (module, name, value)
        for module, names in (("here", globals()), ("ggml", vars(ggml)))
        for name, value in sorted(names.items())
        if isinstance(value, (int, bytes, str, tuple)) and not name.startswith("__")
    ]
    digest = hashlib.sha256(repr(values).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _filter(frozen: int) -> Callable[..., Any]:
    def node_filter(tensor: Any, ask: Any, state_pointer: Any) -> Any:
        frozen  # noqa: B018  a free variable's value is a part of the cache's key
        state = carray(state_pointer, (STATE_WORDS,), dtype=np.int64)
        words = carray(tensor, (_TENSOR_WORDS,), dtype=np.int64)
        op = words[_OP_WORD] & 0xFFFFFFFF
        if state[FAULT] != 0:
            if ask and op == _MUL_MAT_ID and state[IS_HOST] != 0:
                _disarm(state, words)
            # Asked: stop here. Stopped: end the graph, or go on to a node after which llama.cpp
            # asks `abort_check`: it does not after those that compute nothing.
            return ask or state[ANNOUNCED] == 0
        known = _asked(state, tensor, words, op) if ask else _stopped(state, tensor, words, op)
        if known != _TO_PYTHON:
            return known != 0
        state[ACK] = 0
        state[CALLS] += 1
        answer: Any = call(state[CALLBACK], tensor, types.int8(ask))  # type: ignore[call-arg]
        if state[ACK] == 0:
            state[FAULT] = 1
            return True
        if op == _MUL_MAT_ID and words[_IDS_WORD] == state[ROUTED]:
            _point_at_slots(state, tensor, words)
        return answer != 0

    return node_filter


@functools.cache
def abort_check() -> Any:
    """Whether to abort the graph, as a numba cfunc `bool (int64 *state)`.

    llama.cpp asks after every node, on the thread that runs the filter, until the answer is yes. It
    logs a line for each aborted graph, which is why announced batches do without.
    """

    @numba.cfunc(types.boolean(types.voidptr))
    def aborts(state_pointer: Any) -> Any:
        state = carray(state_pointer, (STATE_WORDS,), dtype=np.int64)
        if state[FAULT] == 0 or state[ANNOUNCED] != 0:
            return False
        # llama.cpp asks when the node has run, so every thread has read which ids it uses.
        _point_back(state)
        _give_back(state)
        state[FAULT], state[VOID] = 0, 1
        state[PENDING] = state[ROUTED] = state[WEIGHTS] = 0
        return True

    return aborts
