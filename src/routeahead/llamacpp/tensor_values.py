"""Values of the graph's tensors: in place, or a copy if they lie on a device.

llama.cpp's scheduler copies what one device computed and another needs, when the part of the graph
(*split*) that needs it begins. The copy is a tensor of its own, named after the device, the
original and a number: `CPU#ffn_moe_topk-3#0`.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp import ggml
from routeahead.types import Floats, Ids

Bytes = npt.NDArray[np.uint8]

_COPY = re.compile(rb"^[^#]+#(.+)#\d+$")


def original_name(name: bytes) -> bytes:
    """Name of the tensor that one of this name is a copy of, made for another device; its own if
    it is none."""
    found = _COPY.match(name)
    return found[1] if found else name


def on_host(tensor: ggml.Tensor) -> bool:
    """Whether the CPU can read a tensor's data. Tensors without a buffer are ours."""
    buffer = ggml.tensor_at(tensor.view_src).buffer if tensor.view_src else tensor.buffer
    return not buffer or bool(ggml.library().ggml_backend_buffer_is_host(buffer))


def in_place(
    tensor: ggml.Tensor, dtype: type[np.generic], columns: int, rows: int
) -> npt.NDArray[Any]:
    """Values of 4 bytes as (rows, columns), in the graph's own memory, which the CPU can read.

    Columns lie along one axis of the ggml shape and rows along another, at any distance: the top-k
    is a view of the argsort. There are no rows where the last layer of a ubatch has no output to
    give.
    """
    shape = int(tensor.ne[rows]), int(tensor.ne[columns])
    if not shape[0]:
        return np.empty(shape, dtype)
    strides = int(tensor.nb[rows]), int(tensor.nb[columns])
    memory: Any = (ctypes.c_char * _extent(shape, strides)).from_address(tensor.data)
    values: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, strides=strides)
    return values


class _Fetched:
    """A copy of a device's values, shaped as `in_place` has them.

    Attributes:
        array: the values; a write to them reaches the graph with `write`.
    """

    def __init__(
        self, tensor: ggml.Tensor, dtype: type[np.generic], columns: int, rows: int
    ) -> None:
        self._tensor = tensor
        shape = int(tensor.ne[rows]), int(tensor.ne[columns])
        strides = int(tensor.nb[rows]), int(tensor.nb[columns])
        self._memory = _fetch(tensor, _extent(shape, strides) if shape[0] else 0)
        self._graphs = self._memory.copy()
        self.array: npt.NDArray[Any] = np.ndarray(shape, dtype, self._memory.data, strides=strides)

    def write(self) -> None:
        """Puts changes into the graph. What depends on them may not have been computed yet."""
        if np.array_equal(self._memory, self._graphs):
            return
        ggml.library().ggml_backend_tensor_set(
            ctypes.addressof(self._tensor), self._memory.ctypes.data, 0, self._memory.size
        )
        self._graphs = self._memory.copy()


class GraphValues:
    """The values that are shown to an observer, who may write to them.

    Attributes:
        offloaded: some tensors lie on a device. Else nothing is looked up, and all is in place.
    """

    def __init__(self) -> None:
        self.offloaded = False
        self._fetched: list[_Fetched] = []

    def begin(self) -> None:
        """A layer begins: what was read of the layer before is nobody's any more."""
        self._fetched.clear()

    def ids(self, tensor: ggml.Tensor) -> Ids:
        """Int32 of ggml shape (columns, rows) as (rows, columns)."""
        values: Ids = self._read(tensor, np.int32, 0, 1)
        return values

    def floats(self, tensor: ggml.Tensor) -> Floats:
        """Float32 of ggml shape (columns, rows) as (rows, columns)."""
        values: Floats = self._read(tensor, np.float32, 0, 1)
        return values

    def weights(self, tensor: ggml.Tensor) -> Floats:
        """Float32 of ggml shape (1, slots, rows) as (rows, slots)."""
        values: Floats = self._read(tensor, np.float32, 1, 2)
        return values

    def write(self) -> None:
        """At the end of a stop: what was written to a device's values, in this stop or an earlier
        one of the layer, becomes the graph's."""
        for values in self._fetched:
            values.write()

    def _read(
        self, tensor: ggml.Tensor, dtype: type[np.generic], columns: int, rows: int
    ) -> npt.NDArray[Any]:
        if not self.offloaded or on_host(tensor):
            return in_place(tensor, dtype, columns, rows)
        self._fetched.append(_Fetched(tensor, dtype, columns, rows))
        return self._fetched[-1].array


def fetch(tensor: ggml.Tensor) -> Bytes:
    """A copy of all bytes of a tensor, wherever they lie."""
    return _fetch(tensor, ggml.library().ggml_nbytes(ctypes.addressof(tensor)))


def _fetch(tensor: ggml.Tensor, nbytes: int) -> Bytes:
    memory = np.empty(nbytes, np.uint8)
    if nbytes:
        ggml.library().ggml_backend_tensor_get(
            ctypes.addressof(tensor), memory.ctypes.data, 0, nbytes
        )
    return memory


def _extent(shape: tuple[int, int], strides: tuple[int, int]) -> int:
    """Bytes from the first value to the end of the last."""
    return strides[0] * (shape[0] - 1) + strides[1] * (shape[1] - 1) + 4
