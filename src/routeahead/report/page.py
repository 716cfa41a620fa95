"""The page: one HTML file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from routeahead.report import charts, figures
from routeahead.report.runs import Run

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def render(runs: Sequence[Run], token: int | None = None) -> str:
    """The page of `runs`.

    Args:
        token: position of the token whose reads are shown; None: one that read as much as the
            median of its run.

    Raises:
        SettingsError: there is no such token, or matplotlib is missing.
    """
    charts.check_matplotlib()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        version=version("routeahead"),
        summary=_rows([figures.summary(run) for run in runs]),
        settings=figures.settings(runs),
        **_compared(runs),
        details=[_details(run, token) for run in runs],
    )


def _rows(columns: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "-") for column in columns] for name in names}


def _compared(runs: Sequence[Run]) -> dict[str, Any]:
    """Charts that have all runs."""
    steps = {run.name: run.steps for run in runs if run.steps}
    found = {run.name: figures.curve(run.routes, _n_expert(run)) for run in runs if run.routes}
    curves = {name: one for name, one in found.items() if one}
    measured = {run.name: at for run in runs if (at := figures.measured_hit_rate(run))}
    agreement = {
        name if len(runs) == 1 else f"{run.name}: {name}": layers
        for run in runs
        for name, layers in figures.agreement(run).items()
    }
    return {
        "speed": _drawn(charts.speed(steps)) if len(steps) > 1 else None,
        "curves": _drawn(charts.curves(curves, measured)) if curves else None,
        "curve_tokens": max((one.tokens for one in curves.values()), default=0),
        "agreement": _drawn(charts.by_layer(agreement)) if agreement else None,
    }


def _drawn(svg: str) -> Markup:
    return Markup(svg)  # nosec B704 - matplotlib has escaped what it writes


def _details(run: Run, token: int | None) -> dict[str, Any]:
    """One run's own charts."""
    reads = figures.timeline(run.reads, token) if run.reads is not None else None
    hot = figures.hot_experts(run.routes.trace, _n_expert(run)) if run.routes else None
    return {
        "name": run.name,
        "files": [path.name for path in run.files.values()],
        "text": run.report.get("text", ""),
        "parts": _drawn(charts.parts(run.steps)) if run.steps else None,
        "timeline": reads,
        "reads": _drawn(charts.reads(reads)) if reads else None,
        "hot": hot,
        "heat": _drawn(charts.heat(hot)) if hot else None,
    }


def _n_expert(run: Run) -> int | None:
    count = run.report.get("model", {}).get("experts")
    return count if isinstance(count, int) else None
