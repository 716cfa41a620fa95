"""The figures of a benchmark: medians of its runs, and ratios to the baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from routeahead.bench.runs import Run
from routeahead.bench.statistics import Ratio, Spread, paired_ratio, spread
from routeahead.experts.layout import MIB

SPEED = "tok_per_s"
# If a run hardly missed, ratios of these would be ratios of noise.
MISS_DEPENDENT = ("stall_ms", "mib_per_token", "hit_rate")
COMPARED = (SPEED, "compute_ms", *MISS_DEPENDENT)
LEAST_MISS_RATE = 0.01

_TIMES = ("compute", "stall", "adopt", "mgmt")


@dataclass(frozen=True)
class CellSummary:
    """One cell's runs.

    Attributes:
        runs: those that count.
        errors: of those that do not.
        figures: median and quartiles of each figure that its reports have.
        ratios: to the baseline, of each of COMPARED; the reason, if there is none.
    """

    name: str
    runs: int
    errors: list[str]
    figures: dict[str, Spread]
    ratios: dict[str, Ratio | str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a ratio that is not given is {"not_shown": reason}."""
        speed = self.ratios.get(SPEED)
        return {
            "name": self.name,
            "runs": self.runs,
            "errors": self.errors,
            "figures": {name: asdict(value) for name, value in self.figures.items()},
            "ratios": {
                name: {"not_shown": value} if isinstance(value, str) else asdict(value)
                for name, value in self.ratios.items()
            },
            "verdict": speed.verdict if isinstance(speed, Ratio) else None,
        }


def summarise(
    runs: Sequence[Run], names: Sequence[str], baseline: str, warmup: int
) -> list[CellSummary]:
    """One summary for each cell in `names`; the baseline's has no ratios."""
    by_cell: dict[str, dict[int, dict[str, float]]] = {name: {} for name in names}
    for run in runs:
        if not run.error:
            by_cell[run.cell][run.pass_index] = figures(run.report, warmup)
    summaries = []
    for name, passes in by_cell.items():
        common = sorted(passes.keys() & by_cell[baseline].keys())
        pairs = [(passes[index], by_cell[baseline][index]) for index in common]
        ratios = {} if name == baseline else {figure: _ratio(figure, pairs) for figure in COMPARED}
        errors = [run.error for run in runs if run.cell == name and run.error]
        measured = list(passes.values())
        summaries.append(CellSummary(name, len(measured), errors, _spreads(measured), ratios))
    return summaries


def _spreads(measured: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    shared = [
        name for name in (measured[0] if measured else ()) if all(name in m for m in measured)
    ]
    return {name: spread([m[name] for m in measured]) for name in shared}


def _ratio(figure: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> Ratio | str:
    """The ratio over all pairs, or the reason why there is none."""
    if not pairs:
        return "no pair"
    both = [figures for pair in pairs for figures in pair]
    if any(figure not in figures for figures in both):
        return "not counted"
    if figure in MISS_DEPENDENT:
        if any("miss_rate" not in figures for figures in both):
            return "no misses counted"
        if min(figures["miss_rate"] for figures in both) < LEAST_MISS_RATE:
            return f"missed < {LEAST_MISS_RATE:.0%}"
    if min(figures[figure] for figures in both) <= 0:
        return "is 0"
    return paired_ratio([cell[figure] for cell, _ in pairs], [base[figure] for _, base in pairs])


def figures(report: Mapping[str, Any], warmup: int) -> dict[str, float]:
    """Figures of one run over its decoded tokens but the first `warmup`; absent ones are left out.

    Times are in ms a token. `mib_per_s` is what was read divided by the time that decoding took,
    not by the time that reads took: what the disk has to sustain at this speed.
    """
    steps = {name: values[warmup:] for name, values in report["decode_steps"].items()}
    # A step has several tokens where guesses were right.
    tokens = sum(steps.pop("kept", None) or [1] * len(steps["wall_s"]))
    token = {name: sum(values) / tokens for name, values in steps.items()}
    found = {SPEED: 1 / token["wall_s"], "ms": 1e3 * token["wall_s"]}
    for name in _TIMES:
        if f"{name}_s" in token:
            found[f"{name}_ms"] = 1e3 * token[f"{name}_s"]
    if "bytes_read" in token:
        found["mib_per_token"] = token["bytes_read"] / MIB
        found["mib_per_s"] = token["bytes_read"] / MIB / token["wall_s"]
    if "reads" in token:
        found["reads"] = token["reads"]
    looked_up = token.get("hits", 0) + token.get("misses", 0)
    if looked_up:
        found["hit_rate"] = token["hits"] / looked_up
        found["miss_rate"] = token["misses"] / looked_up
    return found
