"""Reads a model's selection rule off its own graph.

Architectures differ in how they choose experts: what is applied to the router's logits, which
biases, whether groups of experts compete first. All of it stands between the router product and
the top-k, as llama.cpp's `build_moe_ffn` builds it, so it is read there and not kept in a table of
architectures. What is not understood is left to the router.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp import ggml
from routeahead.llamacpp.tensor_values import fetch, in_place, on_host
from routeahead.routing.selection import Activation, SelectionRule

_VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT")
_ACTIVATIONS: dict[tuple[str, ...], Activation] = {
    (): "none",
    ("SOFT_MAX",): "softmax",
    ("SIGMOID",): "sigmoid",
    ("SOFTPLUS", "SQRT"): "sqrt_softplus",
}
_STEPS = ("SOFT_MAX", "SIGMOID", "SOFTPLUS", "SQRT")
_ONE = 0x3F800000  # 1.0 as float32


@dataclass(frozen=True)
class Router:
    """How one layer chooses its experts.

    Attributes:
        matrix: address of the router matrix's tensor.
        rule: what turns its logits into a selection; None if they have no part in it, because a
            table gives each token its experts (DeepSeek 4's hash layers).
        router_bias, selection_bias: addresses of the tensors that are added before and after the
            activation; 0 if there is none, or more than one.
        shared: whether something else uses the logits too (grovemoe chooses a second time by them).
    """

    matrix: int
    rule: SelectionRule | None
    router_bias: int = 0
    selection_bias: int = 0
    shared: bool = False

    @property
    def movable(self) -> bool:
        """Whether the tensors above are all that sets this router apart from one with its rule, its
        probabilities are found, and nothing else depends on it."""
        if not self.rule or not self.rule.weighing or self.shared:
            return False
        router, selection = self.rule.router_bias, self.rule.selection_bias
        return (router is None or self.router_bias > 0) and (
            selection is None or self.selection_bias > 0
        )

    def computes_as(self, other: Router) -> bool:
        """Whether this router's part of the graph, given the tensors of the `other`, is the other's
        part of the graph."""
        if not (self.movable and other.movable and self.rule and other.rule):
            return False
        pairs = (
            (self.matrix, other.matrix),
            (self.router_bias, other.router_bias),
            (self.selection_bias, other.selection_bias),
        )
        return self.rule.steps == other.rule.steps and all(_alike(a, b) for a, b in pairs)


def _alike(a: int, b: int) -> bool:
    """Whether two tensors, or none and none, have the same type and shape."""
    if not (a and b):
        return a == b
    one, other = ggml.tensor_at(a), ggml.tensor_at(b)
    return (one.type, list(one.ne), list(one.nb)) == (other.type, list(other.ne), list(other.nb))


def read_router(topk: int) -> Router | None:
    """The router above the top-k tensor at address `topk`; None if it is not understood."""
    top = ggml.tensor_at(topk)
    sort = strip_views(top)
    if ggml.op_name(sort) == "GET_ROWS":
        return _table(topk)
    if ggml.op_name(sort) != "ARGSORT":
        return None
    node, groups, groups_used = _groups(strip_views(ggml.tensor_at(sort.src[0])))
    steps: list[str] = []  # from the logits on
    biases: list[tuple[int, int, npt.NDArray[np.float32]]] = []  # (steps after it, tensor, values)
    while (name := ggml.op_name(node)) != "MUL_MAT":
        if name == "ADD":
            bias = _bias(node, int(sort.ne[0]))
            if bias is None:
                return None
            biases.append((len(steps), int(node.src[1]), bias))
        elif name in _STEPS and _is_plain(node):
            steps.insert(0, name)
        elif not _picks_rows(node):
            return None
        node = strip_views(ggml.tensor_at(node.src[0]))
    activation = _ACTIVATIONS.get(tuple(steps))
    matrix, hidden = ggml.tensor_at(node.src[0]), ggml.tensor_at(node.src[1])
    shape = (int(matrix.ne[1]), matrix.ne[2], matrix.ne[3])
    if activation is None or matrix.op or hidden.type or shape != (int(sort.ne[0]), 1, 1):
        return None
    router = [(tensor, values) for after, tensor, values in biases if after == len(steps)]
    selection = [(tensor, values) for after, tensor, values in biases if after < len(steps)]
    rule = SelectionRule(
        top_k=int(top.ne[0]),
        activation=activation,
        router_bias=_sum(values for _, values in router),
        selection_bias=_sum(values for _, values in selection),
        groups=groups,
        groups_used=groups_used,
        weighing=_weighing(topk, int(node.src[0])),
    )
    shared = _shared(topk, ctypes.addressof(node))
    return Router(int(node.src[0]), rule, _only(router), _only(selection), shared)


def _only(biases: list[tuple[int, npt.NDArray[np.float32]]]) -> int:
    return biases[0][0] if len(biases) == 1 else 0


def _shared(topk: int, product: int) -> bool:
    """Whether anything but the top-k and its weights uses the logits of a router's `product`."""
    gathered = weights_gathered(topk)
    ends = [topk] + ([int(ggml.tensor_at(gathered).src[0])] if gathered else [])
    known, name = _between(product, ends), ggml.tensor_at(topk).name
    for address in ggml.tensors_after(product):
        node = ggml.tensor_at(address)
        if node.name.startswith(b"ffn_moe_topk-") and node.name != name:
            break  # the next layer's
        uses = known.intersection(node.src) - {topk}
        if uses and address not in known and address != gathered:
            return True
    return False


def _between(product: int, ends: Iterable[int]) -> set[int]:
    """Addresses of all nodes on the way from a product to the `ends`, both included."""
    found, left = {product}, list(ends)
    while left:
        address = left.pop()
        if address not in found and ggml.tensor_at(address).op:
            found.add(address)
            left += [int(source) for source in ggml.tensor_at(address).src if source]
    return found


def weights_gathered(topk: int) -> int:
    """Address of the node that gathers the weights of the top-k at `topk`; 0 if none is found.

    Its source, the *probabilities*, is intact until then, which is after the top-k.
    """
    return next((node for node in ggml.tensors_after(topk) if gathers(node, topk)), 0)


def gathers(address: int, topk: int) -> bool:
    """Whether the tensor at `address` is rows that were chosen by the top-k at `topk`."""
    node = ggml.tensor_at(address)
    return bool(node.src[1] == topk and node.op == ggml.op_code("GET_ROWS"))


def _weighing(topk: int, matrix: int) -> Activation | None:
    """What turns the logits into the probabilities; None if it is not understood.

    It may be something else than what the experts are ranked by: Llama 4 ranks by logits."""
    gathered, steps, biased = weights_gathered(topk), list[str](), False
    node = strip_views(_source(ggml.tensor_at(gathered))) if gathered else None
    while node and (name := ggml.op_name(node)) != "MUL_MAT":
        if name in _STEPS and _is_plain(node) and not biased:
            steps.insert(0, name)
        elif name == "ADD":
            biased = True  # the router's bias: only the product comes before it
        elif not _picks_rows(node):
            return None
        node = strip_views(_source(node))
    return _ACTIVATIONS.get(tuple(steps)) if node and node.src[0] == matrix else None


def _source(node: ggml.Tensor) -> ggml.Tensor:
    return ggml.tensor_at(int(node.src[0]))


def _table(topk: int) -> Router | None:
    """The router of a layer whose experts are looked up: its logits only become weights."""
    gathered = weights_gathered(topk)
    if not gathered:
        return None
    node = strip_views(_source(ggml.tensor_at(gathered)))
    while ggml.op_name(node) in _STEPS:
        node = strip_views(_source(node))
    return Router(int(node.src[0]), None) if ggml.op_name(node) == "MUL_MAT" else None


def _picks_rows(node: ggml.Tensor) -> bool:
    """The rows whose output is wanted are picked, by an input of the graph. A router that runs
    before the attention (smallthinker) has scored all rows of the last layer."""
    return ggml.op_name(node) == "GET_ROWS" and ggml.op_name(ggml.tensor_at(node.src[1])) == "NONE"


def strip_views(node: ggml.Tensor) -> ggml.Tensor:
    """The tensor that a view shows."""
    while ggml.op_name(node) in _VIEWS:
        node = ggml.tensor_at(node.src[0])
    return node


def _groups(node: ggml.Tensor) -> tuple[ggml.Tensor, int, int]:
    """Skips the masking of groups: (scores before it, number of groups, groups that stay)."""
    if ggml.op_name(node) != "SET_ROWS":
        return node, 0, 0
    # The rows of the winning groups (GET_ROWS of the scores) are set in a copy filled with -inf.
    chosen = ggml.tensor_at(node.src[1])
    rows = strip_views(ggml.tensor_at(node.src[0]))
    return strip_views(ggml.tensor_at(rows.src[0])), int(node.ne[1]), int(chosen.ne[0])


def _bias(node: ggml.Tensor, length: int) -> npt.NDArray[np.float32] | None:
    """The weights that an ADD adds to every row, as a copy."""
    bias = ggml.tensor_at(node.src[1])
    if bias.op or bias.type or int(bias.ne[0]) != length or any(n != 1 for n in bias.ne[1:]):
        return None
    values = in_place(bias, np.float32, 0, 1) if on_host(bias) else fetch(bias).view(np.float32)
    return np.array(values.ravel(), np.float32)


def _is_plain(node: ggml.Tensor) -> bool:
    """A softmax may be scaled or masked, which no router of `build_moe_ffn` does."""
    return ggml.op_name(node) != "SOFT_MAX" or (
        node.op_params[0] == _ONE and node.op_params[1] == 0 and not node.src[1]
    )


def _sum(biases: Iterable[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32] | None:
    found = list(biases)
    return sum(found[1:], found[0]) if found else None
