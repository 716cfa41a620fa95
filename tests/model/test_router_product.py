"""The product of a router and its input, by ggml or NumPy."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from routeahead import SettingsError
from routeahead.llamacpp import ggml
from routeahead.llamacpp.router_product import RouterProduct
from routeahead.routing.policy import Precision
from routeahead.routing.selection import SelectionRule

pytestmark = pytest.mark.fast


def matrix(kind: str, values: npt.NDArray[np.float32]) -> tuple[ggml.Tensor, npt.NDArray[np.uint8]]:
    """A tensor struct over `values` stored as `kind`, and its memory."""
    number = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values, number)
    tensor = ggml.Tensor()
    tensor.type, tensor.data = int(number), stored.ctypes.data
    tensor.ne[:] = [values.shape[1], values.shape[0], 1, 1]
    return tensor, stored


@pytest.mark.parametrize("precision", ["f32", "f16", "int8"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_router_product_is_the_product(kind: str, precision: Precision) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((24, 96), dtype=np.float32)
    row = rng.standard_normal(96, dtype=np.float32)
    tensor, stored = matrix(kind, values)
    product = RouterProduct(tensor, precision)
    exact = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).reshape(24, 96)
    expected = exact.astype(np.float64) @ row.astype(np.float64)
    coarse = precision == "int8" or kind == "Q8_0"  # the row is rounded to 8 bits as well
    tolerance = 0.25 if coarse else 0.05 if "F16" in kind + precision.upper() else 1e-5
    for _ in range(3):  # buffers are reused
        np.testing.assert_allclose(product.logits(row), expected, atol=tolerance)
        np.testing.assert_allclose(product.logits(-row), -expected, atol=tolerance)


def test_router_product_in_float32_uses_the_models_memory() -> None:
    values = np.zeros((8, 64), np.float32)
    tensor, stored = matrix("F32", values)
    product = RouterProduct(tensor, "f32")
    weights = np.ndarray(values.shape, np.float32, stored)
    weights[5] = 1
    assert product.logits(np.ones(64, np.float32)).tolist() == [0, 0, 0, 0, 0, 64, 0, 0]


def test_int8_needs_whole_blocks() -> None:
    tensor, _stored = matrix("F32", np.zeros((8, 40), np.float32))
    with pytest.raises(SettingsError, match="multiple of 32 numbers, and this model's have 40"):
        RouterProduct(tensor, "int8")


BIAS = np.linspace(-1, 1, 24, dtype=np.float32)
RULES = [SelectionRule(4, "softmax"), SelectionRule(4, "none", router_bias=BIAS)]


@pytest.mark.parametrize("rule", RULES, ids=["softmax", "bias"])
@pytest.mark.parametrize("precision", ["f32", "f16", "int8"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_the_best_without_a_graph_are_the_graphs(
    kind: str, precision: Precision, rule: SelectionRule
) -> None:
    rng = np.random.default_rng(2)
    tensor, _stored = matrix(kind, rng.standard_normal((24, 96), dtype=np.float32) / 8)
    product, certain = RouterProduct(tensor, precision, rule), 0
    assert product._native
    for row in rng.standard_normal((50, 96), dtype=np.float32):
        for more in (0, 3, 19, 30):
            ids = product.rank(row, more)
            native = product._native.best(row, rule.top_k + more)
            np.testing.assert_array_equal(product._native.logits, product._biased)
            certain += native is not None
            assert native is None or native.tolist() == ids.tolist()
            assert product.best(row, more).tolist() == ids.tolist()
    assert certain > 150


def of_rows(*logits: float) -> RouterProduct:
    """A router whose logits of a vector of ones are these."""
    values = np.repeat(np.array([logits], np.float32).T / 64, 64, axis=1)
    made = matrix("F32", np.ascontiguousarray(values))
    product = RouterProduct(made[0], "f32", SelectionRule(2, "softmax"))
    product.memory = made  # type: ignore[attr-defined]  # kept alive
    return product


@pytest.mark.parametrize(
    ("logits", "certain"),
    [
        ((1, 3, 2, 0), True),
        ((1, 3, 3, 0), False),
        ((1, 3, 2, 2), False),  # the one that is left out is as good as the last one taken
        ((3, 3 + 2**-18, 1, 0), False),  # softmax has fewer bits
        ((200, 90, 3, 2), False),  # the second one's score is 0, and so are the others'
    ],
)
def test_scores_that_may_be_equal_are_the_graphs_to_rank(
    logits: tuple[float, ...], certain: bool
) -> None:
    product, ones = of_rows(*logits), np.ones(64, np.float32)
    assert product._native
    assert (product._native.best(ones, 2) is not None) == certain
    assert product.best(ones).tolist() == product.rank(ones).tolist()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_vector_that_is_no_number_is_the_graphs_to_rank(number: float) -> None:
    product, broken = of_rows(1, 3, 2, 0), np.full(64, number, np.float32)
    assert product._native and product._native.best(broken, 2) is None


def test_another_vector_than_machine_code_takes_is_the_graphs() -> None:
    product = of_rows(1, 3, 2, 0)
    numbers = np.ones((2, 64, 2), np.float32)
    strided, whole = numbers[0, :, 1], numbers[1, :, 0].copy()
    assert product._native
    for hidden in (strided, whole.astype(np.float64), whole[None], whole.astype(">f4")):
        assert product._native.best(hidden, 2) is None
        assert product.best(hidden).tolist() == [1, 2]
    whole.flags.writeable = False
    assert product._native.best(whole, 2) is not None


@pytest.mark.parametrize(
    "rule",
    [
        SelectionRule(2, "sigmoid"),
        SelectionRule(2, "softmax", selection_bias=BIAS),
        SelectionRule(2, "softmax", groups=4, groups_used=2),
    ],
)
def test_a_rule_that_needs_more_than_logits_is_the_graphs(rule: SelectionRule) -> None:
    tensor, _stored = matrix("F32", np.zeros((24, 64), np.float32))
    assert RouterProduct(tensor, "f32", rule)._native is None


def test_struct_of_a_plan_is_what_ggml_fills_in() -> None:
    """A wrong layout would show as a thread count that is not the one asked for."""
    base = ggml.compute_library()
    context = ggml.new_context(8192 + base.ggml_graph_overhead_custom(8, False))
    try:
        a, b = (base.ggml_new_tensor_2d(context, 0, 32, rows) for rows in (4, 1))
        graph = base.ggml_new_graph_custom(context, 8, False)
        base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, a, b))
        plan = base.ggml_graph_plan(graph, 1, None)
        assert (plan.n_threads, plan.work_data, plan.threadpool) == (1, None, None)
        assert plan.work_size < 1 << 20 and ctypes.sizeof(plan) == 56
    finally:
        base.ggml_free(context)
