"""The plots of docs/measurements.md: one pair of figures a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measurements_model import Model

mpl.rcParams["svg.hashsalt"] = "routeahead"  # the same figures give the same file
# Families of settings, told apart by colour and mark: setting's beginning → (colour, mark).
FAMILIES = {
    "stream": ("0.3", "o"),
    "ahead-2+drop": ("tab:purple", "P"),
    "ahead": ("tab:blue", "s"),
    "drop": ("tab:orange", "^"),
    "substitute": ("tab:green", "D"),
    "used": ("tab:red", "v"),
}


def draw(models: Sequence[Model], folder: Path) -> None:
    for model in models:
        _save(_cost(model), folder / f"{model.name}-cost.svg")
        _save(_depth(model), folder / f"{model.name}-depth.svg")


def _cost(model: Model) -> Figure:
    """Perplexity against bytes a token, and against speed."""
    panels = 2 if model.speed else 1
    figure = Figure(figsize=(5 * panels, 4.5), layout="constrained")
    left, *right = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    _scatter(left, model, model.mib_per_token)
    left.set_xlabel("MiB read a token (less is better)")
    left.set_ylabel("perplexity × resident's")
    for axes in right:
        _scatter(axes, model, model.speed_ratio)
        axes.set_xlabel("tokens/s × the lossless stream's (more is better)")
    return figure


def _scatter(axes: Axes, model: Model, across: Callable[[str], float]) -> None:
    axes.axhline(1, color="0.8", linewidth=1)
    for name in model.settings:
        if name.startswith("pre"):  # lossless: they would lie on the stream
            continue
        colour, mark = next(v for k, v in FAMILIES.items() if name.startswith(k))
        x, y = across(name), model.perplexity_ratio(name)
        axes.plot(x, y, mark, color=colour)
        axes.annotate(name, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _depth(model: Model) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for depth in model.agreement:
        known = {
            int(layer): share
            for layer in model.agreement[depth]["by_layer"]
            if (share := model.agreed(depth, layer)) is not None
        }
        left.plot(list(known), list(known.values()), "o-", markersize=3, label=f"N = {depth}")
    left.set_xlabel("MoE layer")
    left.set_ylabel("slots agreed with the router")
    left.set_ylim(0, 1)
    left.legend(frameon=False, fontsize=8)
    depths = [0, *map(int, model.agreement)]
    ratios = [1.0, *(model.perplexity_ratio(f"ahead-{depth}") for depth in model.agreement)]
    right.plot(depths, ratios, "o-")
    right.set_xlabel("N, layers ahead")
    right.set_ylabel("perplexity × resident's")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
