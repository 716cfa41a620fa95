"""Slot numbers for products over experts, where the graph has expert numbers.

The node filter points each product at this tensor when llama.cpp asks about it, and back at its own
ids at the next stop, when it has run.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp import ggml
from routeahead.llamacpp.node_filter import PLACED, POINTED, PRODUCTS, ROUTED, SLOT_IDS
from routeahead.types import Ids

_TENSOR_BYTES = 512  # more than any ggml's tensor struct; what lies behind its name stays zero


class SlotIds:
    """A tensor (rows, top-k) of our own, known to the filter by the state words."""

    def __init__(self, state: npt.NDArray[np.int64]) -> None:
        self._state = state
        self._memory: Any = (ctypes.c_char * _TENSOR_BYTES)()
        self._tensor = ggml.Tensor.from_buffer(self._memory)
        self._tensor.type, self._tensor.nb[0] = ggml.type_code("I32"), 4
        self._tensor.ne[:] = (0, 0, 1, 1)
        self._slots = np.empty(0, np.int32)  # what it shows
        state[SLOT_IDS] = ctypes.addressof(self._memory)

    def show(self, slots: Ids) -> None:
        """The tensor has `slots` (rows, top-k) from now on. No product may be using it."""
        rows, columns = slots.shape
        tensor = self._tensor
        if slots.size > self._slots.size:
            self._slots = np.empty(slots.size, np.int32)
            tensor.data = self._slots.ctypes.data
        self._slots[: slots.size] = slots.ravel()
        self._state[PLACED] = 1
        if (tensor.ne[0], tensor.ne[1]) != (columns, rows):
            tensor.ne[:2] = (columns, rows)
            tensor.nb[1:] = (4 * columns, 4 * columns * rows, 4 * columns * rows)

    def point_back(self) -> None:
        """What the filter does at each stop, for the products behind the last one."""
        for index in range(int(self._state[POINTED])):
            product = ggml.tensor_at(int(self._state[PRODUCTS + index]))
            if product.src[2] == self._state[SLOT_IDS]:
                product.src[2] = int(self._state[ROUTED])
        self._state[POINTED] = 0
