"""Eviction by expected use: what is expected to be used farthest in the future goes first.

Three sums over an expert's uses, which decay with half-lives of 0.7, 5 and 40 tokens, say how
often it is used of late; counts of which expert followed which from one row to the next say what
the latest row makes likely. Both together estimate the chance of a use at the next token, and the
reciprocal the tokens until then: Belady's rule (1966), with an estimate in place of the future. The
constants are those of a study on recorded routings of three models.

A scan needs no special case: of prompts whose ubatches use nearly every expert, those that most
rows use stay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np

from routeahead.experts.eviction import Held, Key
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
_BATCH_LINE, _VISITS = 0, 1  # words of the state
_NONE, _UNKNOWN = -1, -2


class Decay:
    """The eviction of the module's name. Each layer has a *line* in its tables."""

    def __init__(self, sizes: Mapping[int, int], n_expert: int) -> None:
        layers = len(sizes)
        self._used, self._evicted = _compiled()
        self._line = {layer: line for line, layer in enumerate(sizes)}
        self._layers, self._width, self._count = list(sizes), n_expert, 0
        self._sizes = np.array(list(sizes.values()), np.int64)
        # The sums, then the priority: the token at which the next use is expected.
        self._table = np.zeros((layers, _SUMS + 1, n_expert))
        self._table[:, _PRIORITY] = 1 / SCORE_FLOOR
        # Rows that used an expert after one that used another; in the last column, after that one.
        self._successors = np.zeros((layers, n_expert, n_expert + 1), np.uint16)
        self._before = np.full((layers, n_expert), _NONE, np.int32)  # the latest row's experts
        self._flags = np.zeros((layers, n_expert), np.uint8)
        self._first = np.full(layers, _NONE, np.int32)  # of each layer's entries, if known
        self._state = np.array([_NONE, 0], np.int64)
        self._found = np.empty(layers * n_expert, np.int32)  # what a compiled function returns
        self._here = self._flags.data  # quicker than NumPy for one entry

    def use(self, layer: int, experts: Sequence[int], rows: Ids | None) -> list[int]:
        batch = np.array(experts, np.int32)
        each = batch[None] if rows is None else np.array(rows, np.int32, order="C")
        absent = self._used(
            self._line[layer], batch, each, self._successors, self._before,
            self._table, self._flags, self._first, self._state, self._found,
        )  # fmt: skip
        self._count += absent
        return self._found[:absent].tolist()  # type: ignore[no-any-return]

    def admit(self, layer: int, expert: int, *, needed: bool = True) -> None:
        line = self._line[layer]
        self._flags[line, expert] |= _HERE
        self._first[line] = _UNKNOWN
        self._count += 1

    def evict(self, excess: int, held: Held, *, keep: bool) -> list[Key]:
        if held:
            self._hold(held, _HELD)
        gone = self._evicted(
            excess, keep, self._sizes,
            self._table, self._flags, self._first, self._state, self._found,
        )  # fmt: skip
        if held:
            self._hold(held, 0)
        self._count -= gone
        found = (divmod(index, self._width) for index in self._found[:gone].tolist())
        return [(self._layers[line], expert) for line, expert in found]

    def _hold(self, held: Held, flag: int) -> None:
        for layer, experts in held.items():
            line = self._line.get(layer)  # None: of another part
            if line is not None and experts:
                of = list(experts)
                self._flags[line, of] = self._flags[line, of] & (0xFF ^ _HELD) | flag
                self._first[line] = _UNKNOWN

    def __contains__(self, key: Key) -> bool:
        return bool(self._here[self._line[key[0]], key[1]] & _HERE)

    def __len__(self) -> int:
        return self._count


@functools.cache
def _compiled() -> tuple[Any, Any]:
    """`_use` and `_evict` as machine code, which numba keeps on disk where it finds a folder."""
    tables = "float64[:,:,::1], uint8[:,::1], int32[::1], int64[::1], int32[::1]"
    functions = {
        _use: "int64, int32[::1], int32[:,::1], uint16[:,:,::1], int32[:,::1]",
        _evict: "int64, boolean, int64[::1]",
    }

    def compile_all(*, cached: bool) -> tuple[Any, ...]:
        return tuple(
            numba.njit(f"int64({own}, {tables})", cache=cached, error_model="numpy")(function)
            for function, own in functions.items()
        )

    try:
        use, evict = compile_all(cached=True)
    except Exception:  # no folder that can be written, a full disk, a damaged file
        use, evict = compile_all(cached=False)
    return use, evict


def _use(
    line: int, batch: Any, rows: Any, successors: Any, before: Any,
    table: Any, flags: Any, first: Any, state: Any, absent: Any,
) -> Any:  # fmt: skip
    """A layer's batch: `batch` are its distinct experts, `rows` [row, slot] those of each row.

    Returns how many were absent, which `absent` begins with.
    """
    _end_batch(flags, first, state)
    if rows.shape[0] == 0:  # of a prompt, the last layer may see none: no visit
        return 0
    state[_BATCH_LINE], first[line] = line, _UNKNOWN
    state[_VISITS] += 1
    _add_uses(table[line], batch, rows)
    for row in range(rows.shape[0]):
        _follow(successors[line], before[line], rows[row])
    _prioritise(table[line], successors[line], before[line], state[_VISITS] / table.shape[0])
    count = 0
    for expert in batch:
        if flags[line, expert] & _HERE == 0:
            absent[count] = expert
            count += 1
        flags[line, expert] |= _HERE | _IN_BATCH
    return count


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


def _evict(
    excess: int, keep: bool, sizes: Any,
    table: Any, flags: Any, first: Any, state: Any, gone: Any,
) -> Any:  # fmt: skip
    """Removes the entries whose next use is expected last until `excess` bytes are free.

    Returns how many, and writes line * experts + expert of each to `gone`.
    """
    if not keep:
        _end_batch(flags, first, state)
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
