"""The plot of an evaluation: perplexity against the bytes that a token reads from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from routeahead.errors import SettingsError
from routeahead.evaluation.summary import Summary
from routeahead.experts.layout import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_GREY = "0.45"


def check_plot(path: Path) -> None:
    """Checks that `plot` can draw into a file of this name.

    Raises:
        SettingsError: matplotlib is missing, or the name has no suffix of a plot.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: give a plot a name that ends in {' or '.join(SUFFIXES)}")
    _new_figure()


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Draws one point a setting; the first summary is the baseline, a dashed line.

    Raises:
        SettingsError: matplotlib is missing, no text was graded, or the file cannot be written.
    """
    points = [
        (one.cost["bytes_per_token"] / MIB, one.text["perplexity"], one.name)
        for one in summaries
        if one.text
    ]
    if not points:
        raise SettingsError("a plot shows perplexity: give --text")
    figure = _new_figure()
    axes = figure.add_subplot()
    _draw_baseline(axes, points[0][1], points[0][2])
    _draw_settings(axes, sorted(points[1:]))
    axes.set_xlabel("MiB read from disk a token")
    axes.set_ylabel("perplexity")
    axes.set_xlim(left=0)
    axes.margins(0.15)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SettingsError(f"{path}: cannot write the plot: {error.strerror}") from None


def _draw_baseline(axes: Axes, perplexity: float, name: str) -> None:
    axes.axhline(perplexity, color=_GREY, linestyle="--", linewidth=1)
    axes.annotate(
        f"{name}\n{perplexity:.4g}",
        (1, perplexity),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=_GREY,
    )


def _draw_settings(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Labels are above and below in turn, because neighbours often have the same perplexity."""
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    axes.scatter(xs, ys, zorder=3, clip_on=False)  # a point at 0 is on the axis
    for index, (x, y, name) in enumerate(points):
        offset = 8 if index % 2 == 0 else -16
        axes.annotate(name, (x, y), xytext=(0, offset), textcoords="offset points", ha="center")


def _new_figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingsError("a plot needs matplotlib: pip install 'routeahead[plot]'") from None
    return Figure(figsize=(7, 4.5), layout="constrained")
