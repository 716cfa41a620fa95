"""Router products outside of llama.cpp's graph: a router matrix times one hidden vector.

Each is a graph of one node that ggml computes on the calling thread. ggml's own kernel, and
not another library's, because it adds in the same order as the model's graph does: in float32 the
logits are the graph's to the last bit, so that a near-tie falls the same way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError, StreamError
from routeahead.llamacpp import ggml
from routeahead.routing.policy import Precision
from routeahead.types import Floats

# What a router's weights are stored as. "f32" is the model's own weights, whatever their type;
# "int8" is Q8_0, which has a scale for every 32 weights.
_STORED = {"f16": "F16", "int8": "Q8_0"}

_NODES = 8  # room in a graph
_STRUCTS = 16 * 512  # bytes for the structs of a few tensors


def check_width(precision: Precision, width: int) -> None:
    """Checks that hidden vectors of `width` numbers fit a precision.

    Raises:
        SettingsError: a row of the router matrix cannot be stored at it.
    """
    if precision == "int8" and width % 32:
        raise SettingsError(
            f"router_precision int8 needs rows of a multiple of 32 numbers, and this model's have "
            f"{width}: use f16 or f32"
        )


class RouterProduct:
    """One layer's router matrix. One thread may use it at a time.

    Attributes:
        width: numbers in a hidden vector.
        n_expert: logits.
    """

    def __init__(self, weights: ggml.Tensor, precision: Precision) -> None:
        """
        Prepares the product.

        Args:
            weights: the model's matrix, ggml shape (width, n_expert); must outlive this object.

        Raises:
            SettingsError: the matrix cannot be stored at that precision.
        """
        self._base = ggml.compute_library()
        self.width, self.n_expert = int(weights.ne[0]), int(weights.ne[1])
        check_width(precision, self.width)
        kind, data = weights.type, int(weights.data)
        if precision != "f32" and ggml.type_name(kind) != _STORED[precision]:
            kind, self._stored = self._convert(weights, _STORED[precision])
            data = self._stored.ctypes.data
        self._input = np.zeros(self.width, np.float32)
        self._logits = np.zeros(self.n_expert, np.float32)
        self._graph = _Graph(self._base)
        matrix = self._graph.tensor(kind, self.width, self.n_expert, data)
        row = self._graph.tensor(0, self.width, 1, self._input.ctypes.data)
        product = self._base.ggml_mul_mat(self._graph.context, matrix, row)
        self._graph.plan(product, self._logits)

    def logits(self, hidden: Floats) -> Floats:
        """Logits (n_expert,) of a hidden vector (width,), in memory that the next call reuses.

        Raises:
            StreamError: ggml refused.
        """
        np.copyto(self._input, hidden)
        self._graph.compute()
        return self._logits

    def _convert(self, weights: ggml.Tensor, name: str) -> tuple[int, npt.NDArray[np.uint8]]:
        base, kind = self._base, ggml.type_code(name)
        values = self._float32(weights)
        stored = np.zeros(base.ggml_row_size(kind, self.width) * self.n_expert, np.uint8)
        base.ggml_quantize_chunk(
            kind, values.ctypes.data, stored.ctypes.data, 0, self.n_expert, self.width, None
        )
        return kind, stored

    def _float32(self, weights: ggml.Tensor) -> npt.NDArray[np.float32]:
        """The matrix (n_expert, width), whatever its type in the file."""
        values = np.zeros((self.n_expert, self.width), np.float32)
        graph = _Graph(self._base)
        source = graph.tensor(weights.type, self.width, self.n_expert, int(weights.data))
        graph.plan(self._base.ggml_cast(graph.context, source, 0), values)
        graph.compute()
        return values


class _Graph:
    """A graph of one node whose operands and result lie in memory of ours."""

    def __init__(self, base: Any) -> None:
        self._base = base
        size = _STRUCTS + base.ggml_graph_overhead_custom(_NODES, False)
        self.context = ggml.new_context(size)
        self._free = base.ggml_free

    def tensor(self, kind: int, columns: int, rows: int, data: int) -> int:
        """Address of a tensor of type `kind` over the memory at `data`."""
        address: int = self._base.ggml_new_tensor_2d(self.context, kind, columns, rows)
        ggml.tensor_at(address).data = data
        return address

    def plan(self, node: int, result: npt.NDArray[np.float32]) -> None:
        """Makes `node` what `compute` computes, into `result`."""
        base = self._base
        ggml.tensor_at(node).data = result.ctypes.data
        self._graph = base.ggml_new_graph_custom(self.context, _NODES, False)
        base.ggml_build_forward_expand(self._graph, node)
        self._plan = base.ggml_graph_plan(self._graph, 1, None)
        self._work = np.zeros(max(1, self._plan.work_size), np.uint8)
        self._plan.work_data = self._work.ctypes.data
        self._plan_pointer = ctypes.byref(self._plan)

    def compute(self) -> None:
        """Runs on this thread; the GIL is released meanwhile."""
        status = self._base.ggml_graph_compute(self._graph, self._plan_pointer)
        if status:
            raise StreamError(f"ggml could not compute a router product (status {status})")

    def __del__(self) -> None:
        self._free(self.context)
