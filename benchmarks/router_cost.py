"""What does a prediction cost in the callback: the product, and the ranking by NumPy, by ggml's
graph or by machine code?

As in a run: 48 router matrices, one after the other, so that each is cold. The variants take turns,
and medians and quartiles of a token are printed in ms.

    python benchmarks/router_cost.py [--experts 128] [--width 2048] [--tokens 60]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from routeahead.llamacpp import ggml
from routeahead.llamacpp.router_product import RouterProduct
from routeahead.routing.selection import SelectionRule

LAYERS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    rule = SelectionRule(8, "softmax", weighing="softmax")
    # Divided so that the softmax of the logits tells all of them apart.
    hidden = rng.standard_normal(given.width, dtype=np.float32) / 16
    matrices = [
        rng.standard_normal((given.experts, given.width), dtype=np.float32) for _ in range(LAYERS)
    ]
    tensors = []
    for values in matrices:
        tensor = ggml.Tensor()
        tensor.data, tensor.ne[:] = values.ctypes.data, [given.width, given.experts, 1, 1]
        tensors.append(tensor)
    plain = [RouterProduct(tensor, "f32") for tensor in tensors]
    ranked = [RouterProduct(tensor, "f32", rule) for tensor in tensors]
    half = [RouterProduct(tensor, "f16", rule) for tensor in tensors]
    small = [RouterProduct(tensor, "int8", rule) for tensor in tensors]
    variants: dict[str, Callable[[int], object]] = {
        "product alone": lambda layer: plain[layer].logits(hidden),
        "product, ranked by NumPy": lambda layer: rule.select(plain[layer].logits(hidden)),
        "product, ranked by ggml": lambda layer: ranked[layer].rank(hidden),
        "  in f16": lambda layer: half[layer].rank(hidden),
        "  in int8": lambda layer: small[layer].rank(hidden),
        "ranked without a graph": lambda layer: ranked[layer].best(hidden),
        "  without, in f16": lambda layer: half[layer].best(hidden),
        "  without, in int8": lambda layer: small[layer].best(hidden),
    }
    spent: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(given.tokens):
        for name, variant in variants.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                variant(layer)
            spent[name].append(1e3 * (time.perf_counter() - start))
    for name, times in spent.items():
        low, middle, high = np.percentile(times, (25, 50, 75))
        print(f"{name:28} {middle:6.2f} ms a token ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
