"""Routers outside of llama.cpp's graph: what a router matrix says of one hidden vector.

Each is a small graph that ggml computes on the calling thread: the product, and what the model's
own graph does with it up to the ranking. ggml's kernels, and not another library's, because they
add and sort in the same order: in float32 logits, probabilities and ranking are the graph's to the
last bit, so that ties fall the same way. One call computes all of it, without the interpreter lock.

Where the ids alone are wanted, of a rule that ranks by the logits, machine code calls the kernels
itself (`llamacpp/native_ranking.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError, StreamError
from routeahead.llamacpp import ggml
from routeahead.llamacpp.native_ranking import NativeRanking, knows_arrays, knows_kernels
from routeahead.llamacpp.tensor_values import fetch, on_host
from routeahead.routing.policy import Precision
from routeahead.routing.selection import Activation, SelectionRule
from routeahead.types import Floats, Ids

# What a router's weights are stored as. "f32" is the model's own weights, whatever their type;
# "int8" is Q8_0, which has a scale for every 32 weights.
_STORED = {"f16": "F16", "int8": "Q8_0"}

_NODES = 16  # room in a graph
_STRUCTS = 32 * 512  # bytes for the structs of that many tensors and their operands
_F32, _DESCENDING = 0, 1


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
    """One layer's router matrix, and what follows it. One thread may use it at a time.

    Attributes:
        width: numbers in a hidden vector.
        n_expert: logits.
        probabilities: float32 (n_expert,), what the graph would gather the chosen experts' weights
            from, in memory that each call reuses; None if the rule does not say.
    """

    probabilities: Floats | None = None

    def __init__(
        self,
        weights: ggml.Tensor,
        precision: Precision,
        rule: SelectionRule | None = None,
    ) -> None:
        """
        Prepares the product.

        Args:
            weights: the matrix, ggml shape (width, n_expert); must outlive this object.
            rule: what follows the product; None if `logits` alone is called.

        Raises:
            SettingsError: the matrix cannot be stored at that precision.
        """
        self._base = ggml.compute_library()
        self.width, self.n_expert = int(weights.ne[0]), int(weights.ne[1])
        check_width(precision, self.width)
        kind, data = weights.type, self._data(weights)
        if precision != "f32" and ggml.type_name(kind) != _STORED[precision]:
            kind, self._stored = self._convert(weights, _STORED[precision])
            data = self._stored.ctypes.data
        self._rule = rule
        self._input = np.zeros(self.width, np.float32)
        self._graph = graph = _Graph(self._base)
        matrix = graph.tensor(kind, self.width, self.n_expert, data)
        row = graph.tensor(_F32, self.width, 1, self._input.ctypes.data)
        product = graph.node(self._base.ggml_mul_mat, matrix, row)
        self._logits = graph.result(product)
        self._native: NativeRanking | None = None
        if rule:
            self._follow(rule, product)
            self._native = self._make_native(kind, data, rule)
        else:
            graph.plan()

    def logits(self, hidden: Floats) -> Floats:
        """Logits (n_expert,) of a hidden vector (width,), without any bias, in memory that the next
        call reuses.

        Raises:
            StreamError: ggml refused.
        """
        np.copyto(self._input, hidden)
        self._graph.compute()
        return self._logits

    def best(self, hidden: Floats, more: int = 0) -> Ids:
        """What `rank` returns; `probabilities` are of no use then.

        Raises:
            StreamError: ggml refused.
        """
        if self._native:
            ids = self._native.best(hidden, self._top_k + more)
            if ids is not None:
                return ids
        return self.rank(hidden, more)

    def rank(self, hidden: Floats, more: int = 0) -> Ids:
        """Ids int32 (top_k + more,), best first, by the rule that was given; all experts if there
        are no more.

        Raises:
            StreamError: ggml refused.
        """
        np.copyto(self._input, hidden)
        self._graph.compute()
        assert self._rule
        if self._rule.groups:
            return self._rule.among_groups(self._scores, more)
        ids: Ids = self._order[: self._rule.top_k + more].copy()
        return ids

    def _follow(self, rule: SelectionRule, product: int) -> None:
        """What llama.cpp's `build_moe_ffn` does with the product."""
        graph = self._graph
        logits = graph.add(product, rule.router_bias)
        self._biased = graph.result(logits)
        scores = probabilities = graph.activate(logits, rule.activation)
        if rule.weighing and rule.weighing != rule.activation:
            probabilities = graph.activate(logits, rule.weighing)
        if rule.weighing:
            self.probabilities = graph.result(probabilities)
        scores = graph.add(scores, rule.selection_bias)
        self._scores = graph.result(scores)
        if not rule.groups:
            self._order: Ids = graph.result(
                graph.node(self._base.ggml_argsort, scores, _DESCENDING), np.int32
            )
        graph.plan()

    def _make_native(self, kind: int, data: int, rule: SelectionRule) -> NativeRanking | None:
        """The ranking without a graph; None if the rule needs more than the logits, or if the
        logits turn out not to be a graph's."""
        self._top_k = rule.top_k
        by_logits = rule.activation in ("none", "softmax")
        if not by_logits or rule.groups or rule.selection_bias is not None:
            return None
        if not (knows_arrays() and knows_kernels(kind)):
            return None
        native = NativeRanking(kind, self.width, self.n_expert, data, rule.router_bias)
        probe = np.random.default_rng(self.width).standard_normal(self.width, np.float32)
        native.best(probe, rule.top_k)
        self.logits(probe)
        return native if np.array_equal(native.logits, self._biased) else None

    def _data(self, weights: ggml.Tensor) -> int:
        """Address of the matrix, or of a copy of a device's."""
        if on_host(weights):
            return int(weights.data)
        self._copy = fetch(weights)
        return int(self._copy.ctypes.data)

    def _convert(self, weights: ggml.Tensor, name: str) -> tuple[int, npt.NDArray[np.uint8]]:
        base, kind = self._base, ggml.type_code(name)
        values = as_float32(weights)
        stored = np.zeros(base.ggml_row_size(kind, self.width) * self.n_expert, np.uint8)
        base.ggml_quantize_chunk(
            kind, values.ctypes.data, stored.ctypes.data, 0, self.n_expert, self.width, None
        )
        return kind, stored


def as_float32(weights: ggml.Tensor) -> Floats:
    """A matrix (n_expert, width), whatever its type in the file, as a copy."""
    base = ggml.compute_library()
    graph = _Graph(base)
    width, n_expert = int(weights.ne[0]), int(weights.ne[1])
    copy = None if on_host(weights) else fetch(weights)
    data = int(weights.data) if copy is None else int(copy.ctypes.data)
    source = graph.tensor(weights.type, width, n_expert, data)
    values: Floats = graph.result(graph.node(base.ggml_cast, source, _F32))
    graph.plan()
    graph.compute()
    return values


class _Graph:
    """A small graph whose operands and results lie in memory of ours."""

    def __init__(self, base: Any) -> None:
        self._base = base
        size = _STRUCTS + base.ggml_graph_overhead_custom(_NODES, False)
        self.context = ggml.new_context(size)
        self._free = base.ggml_free
        self._graph = base.ggml_new_graph_custom(self.context, _NODES, False)
        self._results: dict[int, npt.NDArray[Any]] = {}
        self._operands: list[Floats] = []  # kept alive
        self._activate: dict[Activation, tuple[Callable[..., int], ...]] = {
            "none": (),
            "softmax": (base.ggml_soft_max,),
            "sigmoid": (base.ggml_sigmoid,),
            "sqrt_softplus": (base.ggml_softplus, base.ggml_sqrt),
        }

    def tensor(self, kind: int, columns: int, rows: int, data: int) -> int:
        """Address of a tensor of type `kind` over the memory at `data`."""
        address: int = self._base.ggml_new_tensor_2d(self.context, kind, columns, rows)
        ggml.tensor_at(address).data = data
        return address

    def node(self, function: Callable[..., int], *operands: int) -> int:
        """Address of the node that one of ggml's functions makes."""
        address = function(self.context, *operands)
        self.result(address)
        return address

    def add(self, node: int, bias: Floats | None) -> int:
        """The sum of a node and float32 numbers; the node itself if there are none."""
        if bias is None:
            return node
        self._operands.append(bias)
        operand = self.tensor(_F32, len(bias), 1, bias.ctypes.data)
        return self.node(self._base.ggml_add, node, operand)

    def activate(self, node: int, activation: Activation) -> int:
        for function in self._activate[activation]:
            node = self.node(function, node)
        return node

    def result(self, node: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
        """Where a node's numbers will be, each of 4 bytes; the node is computed with the graph."""
        if node not in self._results:
            tensor = ggml.tensor_at(node)
            values = np.zeros((tensor.ne[1], tensor.ne[0]), np.float32)
            self._results[node], tensor.data = values, values.ctypes.data
            self._base.ggml_build_forward_expand(self._graph, node)
        values = self._results[node].view(dtype)
        return values[0] if len(values) == 1 else values

    def plan(self) -> None:
        """The graph is complete."""
        self._plan = self._base.ggml_graph_plan(self._graph, 1, None)
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
