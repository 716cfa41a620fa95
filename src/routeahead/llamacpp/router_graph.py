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
    """

    matrix: int
    rule: SelectionRule | None


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
    biases: list[tuple[int, npt.NDArray[np.float32]]] = []  # (steps that follow it, values)
    while (name := ggml.op_name(node)) != "MUL_MAT":
        if name == "ADD":
            bias = _bias(node, int(sort.ne[0]))
            if bias is None:
                return None
            biases.append((len(steps), bias))
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
    rule = SelectionRule(
        top_k=int(top.ne[0]),
        activation=activation,
        router_bias=_sum(bias for after, bias in biases if after == len(steps)),
        selection_bias=_sum(bias for after, bias in biases if after < len(steps)),
        groups=groups,
        groups_used=groups_used,
    )
    return Router(int(node.src[0]), rule)


def _table(topk: int) -> Router | None:
    """The router of a layer whose experts are looked up: its logits only become weights."""
    for address in ggml.tensors_after(topk):
        node = ggml.tensor_at(address)
        if node.src[1] == topk and ggml.op_name(node) == "GET_ROWS":
            node = strip_views(ggml.tensor_at(node.src[0]))
            while ggml.op_name(node) in _STEPS:
                node = strip_views(ggml.tensor_at(node.src[0]))
            return Router(int(node.src[0]), None) if ggml.op_name(node) == "MUL_MAT" else None
    return None


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
    values = (ctypes.c_float * length).from_address(bias.data)
    return np.array(values, np.float32)


def _is_plain(node: ggml.Tensor) -> bool:
    """A softmax may be scaled or masked, which no router of `build_moe_ffn` does."""
    return ggml.op_name(node) != "SOFT_MAX" or (
        node.op_params[0] == _ONE and node.op_params[1] == 0 and not node.src[1]
    )


def _sum(biases: Iterable[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32] | None:
    found = list(biases)
    return sum(found[1:], found[0]) if found else None
