"""Route-ahead's candidates: a layer's own router chooses among experts that need no read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from routeahead.types import Floats, Ids


def choose_among(
    router: Ids,
    scores: Callable[[], Floats],
    candidates: Ids,
    cached: Callable[[int], bool],
) -> Ids:
    """Each row's experts int32 (rows, top_k): the router's best of its candidates and the cache.

    Where a row's choice stands, it does so slot by slot.

    Args:
        router: int32 (rows, top_k), the router's own choice.
        scores: returns float32 (rows, n_expert), what it ranked by; -inf for experts out of the
            race. Only called if a choice does not stand.
        candidates: int32 (rows, any number), what was predicted and is being read, best first.
        cached: whether the cache has an expert of this layer.
    """
    chosen, ranked_by = router, None
    for row, read in enumerate(candidates.tolist()):
        wanted = router[row].tolist()
        if all([expert in read or cached(expert) for expert in wanted]):
            continue
        if ranked_by is None:
            chosen, ranked_by = router.copy(), scores()
        best = _best(wanted, ranked_by[row], read, cached)
        if set(best) != set(wanted):
            chosen[row] = best
    return chosen


def _best(
    wanted: Sequence[int], scores: Floats, read: Sequence[int], cached: Callable[[int], bool]
) -> list[int]:
    racing = int(np.count_nonzero(scores > -np.inf))
    ranked = np.argsort(-scores, kind="stable")[:racing].tolist()
    here = (expert for expert in ranked if expert in read or cached(expert))
    # Groups that win may have fewer experts here than a token uses: the best predicted fill up, and
    # where fewer were read than it uses, what the router chose, which is read now.
    found = dict.fromkeys([*islice(here, len(wanted)), *read, *wanted])
    return list(found)[: len(wanted)]
