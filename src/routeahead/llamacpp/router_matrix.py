"""A router matrix of our own, as a tensor that can stand in the place of the model's."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from routeahead.llamacpp import ggml
from routeahead.llamacpp.tensor_values import on_host
from routeahead.types import Floats

_TENSOR_BYTES = 512  # more than any ggml's tensor struct


class RouterMatrix:
    """Keep it alive as long as anything computes with it.

    Attributes:
        address: of the tensor.
        in_graph: the model's own graph may compute with it: its router is not on a device.
    """

    def __init__(self, values: Floats, router: int) -> None:
        """
        Makes a tensor over a copy of `values`.

        Args:
            values: (n_expert, width).
            router: address of the model's matrix, which has the same shape; where it is float32 the
                two differ by their numbers alone, so that the graph takes either.
        """
        self._values = np.ascontiguousarray(values, np.float32)
        self._memory: Any = (ctypes.c_char * _TENSOR_BYTES)()
        ctypes.memmove(self._memory, router, ctypes.sizeof(ggml.Tensor))
        tensor = ggml.Tensor.from_buffer(self._memory)
        width = self._values.shape[1]
        tensor.type, tensor.data = ggml.type_code("F32"), self._values.ctypes.data
        tensor.nb[:2] = (4, 4 * width)
        tensor.nb[2:] = [4 * self._values.size] * (ggml.MAX_DIMS - 2)
        self.in_graph = on_host(ggml.tensor_at(router))
        if not self.in_graph:
            tensor.buffer = None
        self.address = ctypes.addressof(self._memory)
