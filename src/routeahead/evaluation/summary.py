"""The figures of an evaluation, from its finished pieces."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from routeahead.evaluation import quality
from routeahead.telemetry.counters import Totals


@dataclass(frozen=True)
class Summary:
    """The quality of one setting's output, and its cost.

    Attributes:
        name: the setting's.
        settings: keyword arguments of `routeahead.Llama`.
        text: None if no text is graded. `tokens` (graded), `perplexity`, and except in the baseline
            `kl_mean`, `kl_median`, `kl_p99` (nats) and `agreement` (share of the tokens for which
            both give the same one the highest probability).
        answers: by kind, [right, asked]; empty without prompts.
        generations: None if nothing is generated, and in the baseline. `count`, `equal` (how many
            equal the baseline's), `equal_share` (mean share of equal positions), and
            `first_divergence` (for each, the index of the first token that differs, or None).
        cost: of decode alone: `tokens`, `s_per_token` (inside llama_decode), `bytes_per_token`
            (read from disk) and `hit_rate` (None if no expert was looked up).
    """

    name: str
    settings: dict[str, Any]
    text: dict[str, Any] | None
    answers: dict[str, list[int]]
    generations: dict[str, Any] | None
    cost: dict[str, Any]

    @property
    def right(self) -> int:
        return sum(right for right, _ in self.answers.values())

    @property
    def asked(self) -> int:
        return sum(asked for _, asked in self.answers.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Results = Mapping[str, dict[str, Any]]
"""Finished pieces of one setting, by name."""


def summarise(
    name: str, settings: dict[str, Any], results: Results, baseline: Results | None
) -> Summary:
    """Figures of `results`; `baseline` is None if they are the baseline's own."""
    return Summary(
        name,
        settings,
        _text(_of(results, "text"), baseline is not None),
        _answers(_of(results, "answer")),
        _generations(_of(results, "generate"), baseline),
        _cost(list(results.values())),
    )


def _of(results: Results, kind: str) -> Results:
    return {name: result for name, result in results.items() if name.startswith(f"{kind}-")}


def _text(results: Results, compared: bool) -> dict[str, Any] | None:
    if not results:
        return None
    nll = _joined(results, "nll")
    figures: dict[str, Any] = {"tokens": len(nll), "perplexity": quality.perplexity(nll)}
    if compared:
        figures |= quality.kl_summary(_joined(results, "kl"))
        figures["agreement"] = statistics.fmean(_joined(results, "agrees"))
    return figures


def _joined(results: Results, key: str) -> list[float]:
    return [value for result in results.values() for value in result[key]]


def _answers(results: Results) -> dict[str, list[int]]:
    asked = Counter(result["kind"] for result in results.values())
    right = Counter(result["kind"] for result in results.values() if result["right"])
    return {kind: [right[kind], count] for kind, count in sorted(asked.items())}


def _generations(results: Results, baseline: Results | None) -> dict[str, Any] | None:
    if not results or baseline is None:
        return None
    compared: Sequence[quality.Divergence] = [
        quality.divergence(baseline[name]["tokens"], result["tokens"])
        for name, result in results.items()
    ]
    return {
        "count": len(compared),
        "equal": sum(one.first is None for one in compared),
        "equal_share": statistics.fmean(one.equal_share for one in compared),
        "first_divergence": [one.first for one in compared],
    }


def _cost(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = Totals()
    for result in results:
        total.add(Totals(**result["decode"]))
    looked_up = total.hits + total.misses
    return {
        "tokens": total.kept,
        "s_per_token": total.per_token("wall_s"),
        "bytes_per_token": total.per_token("bytes_read"),
        "hit_rate": total.hits / looked_up if looked_up else None,
    }
