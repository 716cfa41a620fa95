"""Few combinations of parameters that still try every two values together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def combined(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The full product: parameter → value, in order."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def pairwise(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations in which every pair of values of two parameters occurs. Values are hashable.

    Greedy, so not always the fewest, and the same at every call: the next one is the first of the
    full product that has most of the pairs that are missing.
    """
    everything = combined(values)
    pairs = [frozenset(combinations(one.items(), 2)) for one in everything]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(missing & pairs[index]))
        chosen.append(everything[best])
        missing -= pairs[best]
    return chosen


def daily_pairs(**values: Sequence[Any]) -> list[Any]:
    """The full product for `parametrize`; what `pairwise` leaves out is marked slow."""
    daily = pairwise(values)
    return [
        pytest.param(*one.values(), marks=() if one in daily else pytest.mark.slow)
        for one in combined(values)
    ]
