"""Eviction by expected use: what is expected to be used farthest in the future goes first.

Three sums over an expert's uses, which decay with half-lives of 0.7, 5 and 40 tokens, say how
often it is used of late; counts of which expert followed which from one row to the next say what
the latest row makes likely. Both together estimate the chance of a use at the next token, and the
reciprocal the tokens until then: Belady's rule (1966), with an estimate in place of the future. The
constants are those of a study on recorded routings of three models.

A scan needs no special case: of prompts whose ubatches use nearly every expert, those that most
rows use stay.

A layer's batch is one call of machine code, which is given two addresses: between two layers the
CPU's caches hold expert weights, and whatever else a call touches is fetched from memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numba
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from routeahead.experts.eviction import Key
from routeahead.machine_code import machine_code
from routeahead.types import Ids

HALF_LIVES = (0.7, 5.0, 40.0)  # tokens
SHARES = (0.77, 0.21, 0.08)  # what a token's use adds to each sum
ROWS_SHARE = 0.25  # what the uses of several rows add, times log(1 + rows)
SUCCESSOR_WEIGHT = 2.0
SUCCESSOR_PRIOR = 2  # rows that count as seen before the first, so that one is no certainty
SCORE_FLOOR = 0.02  # the chance of what has not been used

_SUMS = len(HALF_LIVES)
_PRIORITY = _SUMS  # index behind the sums
_FADE = tuple(2 ** (-1 / half_life) for half_life in HALF_LIVES)
_MOST = 1 << 12  # the counts of an expert's successors are halved here: they have 16 bits

_HERE, _IN_BATCH, _HELD = 1, 2, 4  # bits of a flag: what is only here may go
_NONE, _UNKNOWN = -1, -2

# What machine code is given: the addresses of these arrays, and these numbers.
_TABLE, _SUCCESSORS, _BEFORE, _FLAGS, _FIRST, _SIZES, _BATCH, _ROWS, _FOUND = range(9)
(
    _LAYERS, _WIDTH, _BATCH_LINE, _VISITS,  # of the eviction
    _LINE, _COUNT, _ROW_COUNT, _ROW_WIDTH, _ROOM, _SPARE,  # of a call
    _ABSENT, _GONE,  # what it found
) = range(12)  # fmt: skip

Call = Callable[[int, int], None]


class Decay:
    """The eviction of the module's name. Each layer has a *line* in its tables."""

    def __init__(self, sizes: Mapping[int, int], n_expert: int) -> None:
        layers = len(sizes)
        self._used, self._evicted = _compiled()
        self._line = {layer: line for line, layer in enumerate(sizes)}
        self._layers, self._width, self._entries = list(sizes), n_expert, 0
        # The sums, then the priority: the token at which the next use is expected.
        table = np.zeros((layers, _SUMS + 1, n_expert))
        table[:, _PRIORITY] = 1 / SCORE_FLOOR
        # Rows that used an expert after one that used another; in the last column, after that one.
        self._successors = np.zeros((layers, n_expert, n_expert + 1), np.uint16)
        before = np.full((layers, n_expert), _NONE, np.int32)  # the latest row's experts
        flags = np.zeros((layers, n_expert), np.uint8)
        first = np.full(layers, _NONE, np.int32)  # of each layer's entries, if known
        batch = np.empty(n_expert, np.int32)
        found = np.empty((layers + 1) * n_expert, np.int32)  # experts absent, places gone
        self._batch = (ctypes.c_int32 * batch.size).from_buffer(batch.data)
        self._found = (ctypes.c_int32 * found.size).from_buffer(found.data)
        self._arrays = (
            table, self._successors, before, flags, first, np.array(list(sizes.values()), np.int64),
            batch, batch, found,
        )  # fmt: skip
        self._addresses = (ctypes.c_void_p * len(self._arrays))()
        self._addresses[:] = [array.ctypes.data for array in self._arrays]
        self._numbers = (ctypes.c_int64 * (_GONE + 1))(layers, n_expert, _NONE)
        self._given = ctypes.addressof(self._addresses), ctypes.addressof(self._numbers)
        self._flags, self._first = [line.data for line in flags], first.data  # quick for one entry

    def use(
        self, layer: int, experts: Sequence[int], rows: Ids | None, room: int, spare: int = 0
    ) -> tuple[list[int], list[Key]]:
        count, shape = len(experts), (1, len(experts))
        self._batch[:count] = [*experts]
        address = self._addresses[_BATCH]
        if rows is not None:
            rows = np.ascontiguousarray(rows, np.int32)
            address, shape = rows.ctypes.data, rows.shape
        self._addresses[_ROWS] = address
        self._numbers[_LINE : _SPARE + 1] = [self._line[layer], count, *shape, room, spare]
        self._used(*self._given)
        absent = self._numbers[_ABSENT]
        self._entries += absent
        return self._found[:absent], self._removed(absent)

    def admit(self, layer: int, experts: Collection[int]) -> list[int]:
        line, absent = self._line[layer], list[int]()
        flags = self._flags[line]
        for expert in experts:
            flag = flags[expert]
            if not flag & _HERE:
                absent.append(expert)
            flags[expert] = flag | _HERE | _HELD
        self._first[line] = _UNKNOWN
        self._entries += len(absent)
        return absent

    def fill(self, layer: int, expert: int) -> None:
        line = self._line[layer]
        self._flags[line][expert] |= _HERE
        self._first[line] = _UNKNOWN
        self._entries += 1

    def hold(self, layer: int, experts: Collection[int]) -> None:
        line = self._line[layer]
        flags = self._flags[line]
        for expert in experts:
            flags[expert] |= _HELD
        self._first[line] = _UNKNOWN

    def let_go(self, layer: int, experts: Collection[int]) -> None:
        line = self._line[layer]
        flags = self._flags[line]
        for expert in experts:
            flags[expert] &= 0xFF ^ _HELD
        self._first[line] = _UNKNOWN

    def evict(self, excess: int) -> list[Key]:
        self._numbers[_ROOM] = -excess
        self._evicted(*self._given)
        return self._removed(0)

    def _removed(self, start: int) -> list[Key]:
        """Keys of what the last call removed; `_found` has them from `start` on."""
        gone = self._numbers[_GONE]
        if not gone:
            return []
        self._entries -= gone
        places = [divmod(place, self._width) for place in self._found[start : start + gone]]
        return [(self._layers[line], expert) for line, expert in places]

    def __contains__(self, key: Key) -> bool:
        return bool(self._flags[self._line[key[0]]][key[1]] & _HERE)

    def __len__(self) -> int:
        return self._entries


@functools.cache
def _compiled() -> tuple[Call, Call]:
    """`_use` and `_evict` as machine code."""
    pointer: Any = types.CPointer
    signature = types.void(pointer(types.voidptr), pointer(types.int64))
    functions = [machine_code(signature, function) for function in (_use, _evict)]
    # A call takes less time than handing the interpreter lock over, so it is kept.
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    calls = [prototype(function.address) for function in functions]
    for call, function in zip(calls, functions, strict=True):
        call.code = function  # type: ignore[attr-defined]  # keeps it alive
    use, evict = calls
    return use, evict


def _use(addresses: Any, numbers: Any) -> Any:
    """A layer's batch, and what has to go for it.

    Finds the experts that were absent, then the places (line * experts + expert) of what went.
    """
    state = carray(numbers, (_GONE + 1,))
    table, flags, first = _order(addresses, state)
    _end_batch(flags, first, state)
    line, absent = state[_LINE], 0
    found = carray(addresses[_FOUND], ((state[_LAYERS] + 1) * state[_WIDTH],), np.int32)
    if state[_ROW_COUNT] > 0:  # of a prompt, the last layer may see none: no visit
        state[_BATCH_LINE], first[line] = line, _UNKNOWN
        state[_VISITS] += 1
        batch = carray(addresses[_BATCH], (state[_COUNT],), np.int32)
        _visit(addresses, state, table[line], batch)
        for expert in batch:
            if flags[line, expert] & _HERE == 0:
                found[absent] = expert
                absent += 1
            flags[line, expert] |= _HERE | _IN_BATCH
    state[_ABSENT] = absent
    sizes = carray(addresses[_SIZES], (state[_LAYERS],), np.int64)
    excess = max(0, absent * sizes[line] - state[_SPARE]) - state[_ROOM]
    state[_GONE] = _remove(excess, sizes, table, flags, first, found[absent:])


def _evict(addresses: Any, numbers: Any) -> Any:
    """Removes entries until the room that is missing is there; their places are found."""
    state = carray(numbers, (_GONE + 1,))
    table, flags, first = _order(addresses, state)
    _end_batch(flags, first, state)
    found = carray(addresses[_FOUND], ((state[_LAYERS] + 1) * state[_WIDTH],), np.int32)
    sizes = carray(addresses[_SIZES], (state[_LAYERS],), np.int64)
    state[_GONE] = _remove(-state[_ROOM], sizes, table, flags, first, found)


@numba.njit(error_model="numpy")
def _order(addresses: Any, state: Any) -> Any:
    """The arrays that say what goes first: table, flags, first."""
    layers, width = state[_LAYERS], state[_WIDTH]
    return (
        carray(addresses[_TABLE], (layers, _SUMS + 1, width), np.float64),
        carray(addresses[_FLAGS], (layers, width), np.uint8),
        carray(addresses[_FIRST], (layers,), np.int32),
    )


@numba.njit(error_model="numpy")
def _visit(addresses: Any, state: Any, table: Any, batch: Any) -> Any:
    """What a layer's batch says of the next uses of its experts."""
    layers, width, line = state[_LAYERS], state[_WIDTH], state[_LINE]
    all_successors = carray(addresses[_SUCCESSORS], (layers, width, width + 1), np.uint16)
    successors = all_successors[line]
    before = carray(addresses[_BEFORE], (layers, width), np.int32)[line]
    rows = carray(addresses[_ROWS], (state[_ROW_COUNT], state[_ROW_WIDTH]), np.int32)
    _add_uses(table, batch, rows)
    for row in range(rows.shape[0]):
        _follow(successors, before, rows[row])
    _prioritise(table, successors, before, state[_VISITS] / layers)


@numba.njit(error_model="numpy")
def _end_batch(flags: Any, first: Any, state: Any) -> Any:
    """The experts of the latest batch may go."""
    line = state[_BATCH_LINE]
    if line != _NONE:
        for expert in range(flags.shape[1]):
            flags[line, expert] &= 0xFF ^ _IN_BATCH
        state[_BATCH_LINE], first[line] = _NONE, _UNKNOWN


@numba.njit(error_model="numpy")
def _add_uses(table: Any, batch: Any, rows: Any) -> Any:
    for i in range(_SUMS):
        for expert in range(table.shape[1]):
            table[i, expert] *= _FADE[i]
    if rows.shape[0] == 1:
        for expert in batch:
            for i in range(_SUMS):
                table[i, expert] += SHARES[i]
        return
    uses = np.zeros(table.shape[1], np.int64)
    latest = np.full(table.shape[1], _NONE, np.int64)  # row that counted: a row counts once
    for row in range(rows.shape[0]):
        for expert in rows[row]:
            uses[expert] += latest[expert] != row
            latest[expert] = row
    for expert in batch:
        for i in range(_SUMS):
            table[i, expert] += SHARES[i] * ROWS_SHARE * np.log(1.0 + uses[expert])


@numba.njit(error_model="numpy")
def _follow(successors: Any, before: Any, row: Any) -> Any:
    """Counts what `row` uses as following the row before it, and remembers it."""
    followed = successors.shape[1] - 1
    for expert in before:
        if expert == _NONE:
            break
        if successors[expert, followed] == _MOST:
            for other in range(followed + 1):
                successors[expert, other] >>= 1
        successors[expert, followed] += 1
        for other in row:
            successors[expert, other] += 1
    for slot in range(row.shape[0]):
        before[slot] = row[slot]
    if row.shape[0] < before.shape[0]:
        before[row.shape[0]] = _NONE


@numba.njit(error_model="numpy")
def _prioritise(table: Any, successors: Any, before: Any, position: Any) -> Any:
    """When the next use of each of a layer's experts is expected, in tokens."""
    count = 0
    while count < before.shape[0] and before[count] != _NONE:
        count += 1
    n_expert, priority = table.shape[1], table[_PRIORITY]
    for expert in range(n_expert):
        priority[expert] = table[0, expert] + table[1, expert] + table[2, expert]
    for slot in range(count):
        after = successors[before[slot]]
        weight = SUCCESSOR_WEIGHT / (count * (after[n_expert] + SUCCESSOR_PRIOR))
        for expert in range(n_expert):
            priority[expert] += weight * after[expert]
    for expert in range(n_expert):
        priority[expert] = 1 / (priority[expert] + SCORE_FLOOR) + position


@numba.njit(error_model="numpy")
def _remove(excess: Any, sizes: Any, table: Any, flags: Any, first: Any, gone: Any) -> Any:
    """Removes the entries whose next use is expected last until `excess` bytes are free.

    Returns how many; `gone` begins with their places.
    """
    count = 0
    while excess > 0:
        line = _last_line(table, flags, first)
        if line == _NONE:
            break
        gone[count] = line * flags.shape[1] + first[line]
        count += 1
        flags[line, first[line]] = 0
        first[line] = _UNKNOWN
        excess -= sizes[line]
    return count


@numba.njit(error_model="numpy")
def _last_line(table: Any, flags: Any, first: Any) -> Any:
    """The line of the entry whose next use is expected last; `first` has its expert."""
    found, latest = _NONE, -np.inf
    for line in range(flags.shape[0]):
        priority = table[line, _PRIORITY]
        if first[line] == _UNKNOWN:
            first[line], highest = _NONE, -np.inf
            for expert in range(flags.shape[1]):
                if flags[line, expert] == _HERE and priority[expert] > highest:
                    first[line], highest = expert, priority[expert]
        if first[line] != _NONE and priority[first[line]] > latest:
            found, latest = line, priority[first[line]]
    return found
