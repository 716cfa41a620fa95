"""A router product and the best of its experts as one call of machine code.

ggml's own kernels multiply row by row, as its graphs do, so that the logits are a graph's to the
last bit. What a graph costs beside them is left out: its nodes, and an operand's copy. Between two
layers all of that comes from memory again, and costs as much as the product.

Experts are ranked by their logits. The activation that follows in the graph keeps that order, but
for logits that are so close, or so far apart, that rounding makes their scores equal: whoever asks
is told that they are, and asks the graph, so that ties fall as they do there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from routeahead.llamacpp import ggml
from routeahead.llamacpp.native_code import pointer
from routeahead.machine_code import machine_code
from routeahead.types import Floats, Ids

# What machine code is given.
(
    _DOT, _CONVERT,  # addresses of ggml's kernels; no conversion: 0
    _MATRIX, _ROW_BYTES, _WIDTH, _ROWS, _BIAS,  # no bias: 0
    _CONVERTED, _LOGITS, _VALUES, _IDS,  # addresses of what it writes
    _COUNT, _FLOAT32,  # experts to rank; NumPy's type
    _WORDS,
) = range(14)  # fmt: skip

# ggml's types, each with the one that its product takes: F32, F16, Q4_0 (Q8_0), Q4_K (Q8_K).
_OPERANDS = {0: 0, 1: 1, 2: 8, 12: 15}

_CLOSE, _FAR = 1e-4, 60.0  # logits whose scores may be equal: softmax has 24 bits, exp 87 nats
_LARGE = 2 << 20  # bytes: with a larger matrix, the interpreter lock is given up for the product
_LINE = 64  # bytes of the CPU's caches
_AHEAD = 16 << 10  # bytes: a core that asks only for what it needs next waits for memory

# Words of NumPy's struct of an array, which `knows_arrays` compares with what NumPy says.
_DATA, _AXES, _SHAPE, _STRIDES, _TYPE, _ARRAY_WORDS = 2, 3, 4, 5, 7, 8

Rank = Callable[[int, Floats], int]


class NativeRanking:
    """One router: a matrix, and a bias that may be added to the logits.

    Attributes:
        logits: float32 (rows,), of the last call that took its vector.
    """

    def __init__(self, kind: int, width: int, rows: int, data: int, bias: Floats | None) -> None:
        """`data`: address of the matrix, which has `rows` of `width` numbers of ggml type `kind`;
        it must outlive this object."""
        base = ggml.compute_library()
        traits = base.ggml_get_type_traits_cpu(kind).contents
        operand = base.ggml_get_type_traits_cpu(traits.vec_dot_type).contents
        self.logits = np.zeros(rows, np.float32)
        self._converted = np.zeros(base.ggml_row_size(traits.vec_dot_type, width), np.uint8)
        self._values, self._ids = np.zeros(rows + 1, np.float32), np.zeros(rows + 1, np.int32)
        self._bias = bias
        row_bytes = base.ggml_row_size(kind, width)
        converts = ggml.type_name(traits.vec_dot_type) != "F32"
        self._words = (ctypes.c_int64 * _WORDS)(
            traits.vec_dot, (operand.from_float or 0) if converts else 0,
            data, row_bytes, width, rows, 0 if bias is None else bias.ctypes.data,
            self._converted.ctypes.data, self.logits.ctypes.data,
            self._values.ctypes.data, self._ids.ctypes.data,
            0, id(np.dtype(np.float32)),
        )  # fmt: skip
        self._address = ctypes.addressof(self._words)
        alone, beside = _compiled()
        self._rank = beside if rows * row_bytes > _LARGE else alone
        self._count = 0

    def best(self, hidden: Floats, count: int) -> Ids | None:
        """Ids int32 (count,) for a hidden vector, best first; None if `hidden` is not float32
        (width,) in one piece, or if what follows in the graph may make scores equal."""
        if count != self._count:
            self._words[_COUNT] = self._count = min(count, len(self.logits))
        if not self._rank(self._address, hidden):
            return None
        ids: Ids = self._ids[: self._count].copy()
        return ids


@functools.cache
def knows_kernels(kind: int) -> bool:
    """Whether ggml's struct of kernels is what `ggml.Traits` takes it for, as far as known types
    tell, and has a product of ggml type `kind`."""
    traits = ggml.compute_library().ggml_get_type_traits_cpu
    for known, operand in _OPERANDS.items():
        found = traits(known).contents
        if not found.vec_dot or found.vec_dot_type != operand:
            return False
    return bool(traits(kind).contents.vec_dot)


@functools.cache
def knows_arrays() -> bool:
    """Whether NumPy's struct of an array is what machine code takes it for."""
    column = np.zeros((3, 5), np.float32)[1:, 2]
    words = (ctypes.c_int64 * _ARRAY_WORDS).from_address(id(column))
    shape, strides = (ctypes.c_int64.from_address(words[i]).value for i in (_SHAPE, _STRIDES))
    found = words[_DATA], words[_AXES] & 0xFFFFFFFF, shape, strides, words[_TYPE]
    return found == (column.ctypes.data, 1, *column.shape, *column.strides, id(column.dtype))


@intrinsic
def _dot(_typing: Any, kernel: Any, width: Any, result: Any, row: Any, operand: Any) -> Any:
    """Calls ggml's `void vec_dot(n, s, bs, x, bx, y, by, nrc)` for one row."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        short, long, place = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
        kinds = [short, place, long, place, long, place, long, short]
        target = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        s, x, y = (builder.inttoptr(argument, place) for argument in arguments[2:])
        n, none, one = builder.trunc(arguments[1], short), long(0), short(1)
        builder.call(target, [n, s, none, x, none, y, none, one])
        return long(0)

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def _convert(_typing: Any, kernel: Any, numbers: Any, converted: Any, width: Any) -> Any:
    """Calls ggml's `void from_float(x, y, k)`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        long, place = ir.IntType(64), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, place, long])
        target = builder.inttoptr(arguments[0], kind.as_pointer())
        x, y = (builder.inttoptr(argument, place) for argument in arguments[1:3])
        builder.call(target, [x, y, arguments[3]])
        return long(0)

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def _prefetch(_typing: Any, address: Any) -> Any:
    """Asks for a line of memory, and does not wait for it. An address that is none does no harm."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        short, place = ir.IntType(32), ir.IntType(8).as_pointer()
        name = "llvm.prefetch.p0i8"
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [place, short, short, short]), name
        )
        read, second_level, data = short(0), short(2), short(1)
        builder.call(function, [builder.inttoptr(arguments[0], place), read, second_level, data])
        return ir.IntType(64)(0)

    return types.int64(types.int64), generate


@numba.njit(error_model="numpy")
def _numbers(array: Any, words: Any) -> Any:
    """Address of the numbers of a NumPy array; 0 if it is not float32 (width,) in one piece."""
    if array[_TYPE] != words[_FLOAT32] or array[_AXES] & 0xFFFFFFFF != 1:
        return 0
    shape = carray(pointer(array[_SHAPE]), (1,), np.int64)  # type: ignore[call-arg]
    strides = carray(pointer(array[_STRIDES]), (1,), np.int64)
    return array[_DATA] if shape[0] == words[_WIDTH] and strides[0] == 4 else 0


@numba.njit(error_model="numpy")
def _multiply(words: Any, operand: Any, logits: Any) -> Any:
    """The logits, without a bias."""
    if words[_CONVERT] != 0:
        _convert(words[_CONVERT], operand, words[_CONVERTED], words[_WIDTH])  # type: ignore[call-arg]
        operand = words[_CONVERTED]
    row = asked = words[_MATRIX]
    end = row + words[_ROWS] * words[_ROW_BYTES]
    for place in range(logits.shape[0]):
        while asked < min(end, row + words[_ROW_BYTES] + _AHEAD):
            _prefetch(asked)  # type: ignore[call-arg]
            asked += _LINE
        _dot(words[_DOT], words[_WIDTH], words[_LOGITS] + 4 * place, row, operand)  # type: ignore[call-arg]
        row += words[_ROW_BYTES]


@numba.njit(error_model="numpy")
def _select(logits: Any, values: Any, ids: Any, count: Any) -> Any:
    """Sorts the best `count` experts and one more; whether the order is the graph's certainly."""
    found = 0
    for expert in range(logits.shape[0]):
        value = logits[expert]
        if not -np.inf < value < np.inf:
            return False
        if found > count:
            if value <= values[count]:
                continue
            found = count
        place = found
        while place > 0 and values[place - 1] < value:
            values[place], ids[place] = values[place - 1], ids[place - 1]
            place -= 1
        values[place], ids[place] = value, expert
        found += 1
    for place in range(1, found):
        if values[place - 1] - values[place] < _CLOSE:
            return False
    return count > 0 and values[0] - values[count - 1] < _FAR


def _rank(addresses: Any, hidden: Any) -> Any:
    """The logits of a hidden vector, a NumPy array, and its best experts; returns 0 if not."""
    words = carray(addresses, (_WORDS,))
    operand = _numbers(carray(hidden, (_ARRAY_WORDS,)), words)
    if operand == 0:
        return 0
    rows = words[_ROWS]
    logits = carray(pointer(words[_LOGITS]), (rows,), np.float32)  # type: ignore[call-arg]
    values = carray(pointer(words[_VALUES]), (rows + 1,), np.float32)
    ids = carray(pointer(words[_IDS]), (rows + 1,), np.int32)
    _multiply(words, operand, logits)
    if words[_BIAS] != 0:
        bias = carray(pointer(words[_BIAS]), (rows,), np.float32)
        for expert in range(rows):
            logits[expert] += bias[expert]
    return 1 if _select(logits, values, ids, words[_COUNT]) else 0


@functools.cache
def _compiled() -> tuple[Rank, Rank]:
    """`_rank` as machine code that keeps the interpreter lock, and that lets another thread have
    it."""
    pointers: Any = types.CPointer
    array = pointers(types.int64)
    function = machine_code(types.int32(array, array), _rank)
    calls = []
    for prototype in (ctypes.PYFUNCTYPE, ctypes.CFUNCTYPE):
        kind = prototype(ctypes.c_int, ctypes.c_void_p, ctypes.py_object)
        address: Any = function.address
        call: Any = kind(address)
        call.code = function  # keeps it alive
        calls.append(call)
    alone, beside = calls
    return alone, beside
