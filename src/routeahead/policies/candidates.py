"""Route-ahead's candidates: a layer's own router chooses among experts that need no read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from routeahead.types import Floats, Ids


def choose_among(
    router: Ids, scores: Floats, candidates: Ids, cached: Callable[[int], bool]
) -> Ids:
    """One row's experts int32 (top_k,): the router's best of the candidates and what is cached.

    Where the router's choice stands, it does so slot by slot.

    Args:
        router: int32 (top_k,), the router's own choice.
        scores: float32 (n_expert,), what it ranked by; -inf for experts out of the race.
        candidates: int32, what was predicted and is being read, best first.
        cached: whether the cache has an expert of this layer.
    """
    read = set(candidates.tolist())

    def here(expert: int) -> bool:
        return expert in read or cached(expert)

    if all(map(here, router.tolist())):
        return router
    racing = int(np.count_nonzero(scores > -np.inf))
    ranked = np.argsort(-scores, kind="stable")[:racing].tolist()
    # Groups that win may have fewer experts here than a token uses: the best predicted fill up, and
    # where fewer were read than it uses, what the router chose, which is read now.
    best = islice(filter(here, ranked), len(router))
    found = dict.fromkeys([*best, *candidates.tolist(), *router.tolist()])
    chosen = list(found)[: len(router)]
    return router if set(chosen) == set(router.tolist()) else np.array(chosen, np.int32)
