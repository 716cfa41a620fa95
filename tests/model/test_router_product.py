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
