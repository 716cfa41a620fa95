"""What the test-suite relies on to leave combinations out."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from support.pairwise import combined, pairwise


@pytest.mark.parametrize(
    ("sizes", "most"), [((3, 2, 3), 9), ((3, 2, 3, 2, 2), 12), ((2, 2, 2), 4), ((4, 3), 12)]
)
def test_every_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    values = {f"p{index}": range(size) for index, size in enumerate(sizes)}
    chosen = pairwise(values)
    for first, second in combinations(values, 2):
        met = {(one[first], one[second]) for one in chosen}
        assert met == set(product(values[first], values[second]))
    assert len(chosen) <= most
    assert chosen == pairwise(values)
    assert all(one in combined(values) for one in chosen)


def test_the_full_product_is_in_order() -> None:
    assert combined({"a": [1, 2], "b": "xy"}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
