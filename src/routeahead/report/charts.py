"""Charts as inline SVG, drawn by matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from routeahead.errors import SettingsError
from routeahead.report.figures import ByLayer, Curve, HotExperts, Timeline
from routeahead.report.runs import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The same colours as the page of `serve`.
_PARTS = {"compute": "#2a9d8f", "stall": "#e76f51", "mgmt": "#e9c46a"}
_KINDS = {"demand": "#e76f51", "committed": "#2a9d8f", "speculative": "#457b9d"}
_SERIES = ("#2a9d8f", "#e76f51", "#457b9d", "#e9c46a", "#8d5a97", "#6c757d", "#b5838d", "#588157")
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may have a $
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_WIDTH = 8.6  # inches


def check_matplotlib() -> None:
    """
    Raises:
        SettingsError: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError("a report needs matplotlib: pip install 'routeahead[plot]'") from None


class Canvas:
    """One chart while it is drawn; afterwards `svg` has it.

    Attributes:
        axes: of each panel, from the top.
    """

    def __init__(self, height: float, *heights: float) -> None:
        """`height` is in inches; several `heights` are panels that share the x axis."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        self.svg = ""
        self._style = rc_context(_STYLE)
        self._figure: Figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        self._heights = heights or (1.0,)

    def __enter__(self) -> Sequence[Axes]:
        self._style.__enter__()
        ratios = {"height_ratios": list(self._heights)}
        panels = self._figure.subplots(len(self._heights), sharex=True, gridspec_kw=ratios)
        return list(np.atleast_1d(panels))

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            if kind is None:
                self.svg = _svg(self._figure)
        finally:
            self._style.__exit__(kind, *rest)


def _svg(figure: Figure) -> str:
    """Without the XML's head and metadata, which a page has no use for."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names in letters that its own font lacks
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.S)
    return text[text.index("<svg") :]


def _label(name: str) -> str:
    """matplotlib leaves out of a legend what begins with an underscore."""
    return name.lstrip("_") or "run"


def colour(index: int) -> str:
    return _SERIES[index % len(_SERIES)]


def speed(steps: Mapping[str, Columns]) -> str:
    """Time of each decoded token, a line a run."""
    canvas = Canvas(2.6)
    with canvas as (axes,):
        for index, (name, columns) in enumerate(steps.items()):
            wall = columns["wall"]
            axes.plot(1 + np.arange(len(wall)), wall, color=colour(index), lw=1, label=_label(name))
        axes.set(xlabel="decoded token", ylabel="ms", ylim=(0, None))
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, ncols=4)
    return canvas.svg


def parts(columns: Columns) -> str:
    """Where the time of each decoded token of a run went, and how many of its experts it found."""
    canvas = Canvas(3.2, 3, 1)
    with canvas as (axes, below):
        token = 1 + np.arange(len(columns["wall"]))
        labels = ["compute", "stall", "management"]
        values = [np.maximum(columns[name], 0) for name in _PARTS]
        axes.stackplot(token, *values, labels=labels, colors=list(_PARTS.values()), step="mid")
        axes.set(ylabel="ms", ylim=(0, None))
        axes.legend(frameon=False, ncols=3, loc="upper right")
        looked_up = columns["hits"] + columns["misses"]
        rate = np.divide(
            100.0 * columns["hits"], looked_up, out=np.full(len(token), np.nan), where=looked_up > 0
        )
        below.plot(token, rate, color=colour(2), lw=1)
        below.set(xlabel="decoded token", ylabel="hits, %", ylim=(0, 102))
        below.locator_params(axis="x", integer=True)
    return canvas.svg


def reads(token: Timeline) -> str:
    """One token's reads by lane and by layer, coloured by kind."""
    layers = np.unique(token.layer)
    lanes = np.unique(token.lane)
    upper, lower = 0.6 + 0.3 * len(lanes), 0.4 + 0.14 * len(layers)
    canvas = Canvas(0.3 + upper + lower, upper, lower)
    with canvas as (above, below):
        for kind in dict.fromkeys([*_KINDS, *token.kind.tolist()]):
            own = token.kind == kind
            if own.any():
                shown = _KINDS.get(kind, "#6c757d")
                label = f"{kind} ({int(own.sum())} reads)"
                _bars(above, token, own, np.searchsorted(lanes, token.lane), shown, label)
                _bars(below, token, own, np.searchsorted(layers, token.layer), shown, "")
        _rows(above, lanes, "lane", every=1)
        _rows(below, layers, "layer", every=1 + len(layers) // 25)
        below.set_xlabel("ms from the token's first read")
        above.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return canvas.svg


def _bars(axes: Axes, token: Timeline, own: Any, row: Any, shown: str, label: str) -> None:
    # A pale edge tells reads apart that follow each other at once.
    axes.barh(
        row[own], token.length[own], left=token.begin[own], height=0.8, color=shown, label=label,
        edgecolor="white", linewidth=0.3,
    )  # fmt: skip


def _rows(axes: Axes, values: Any, name: str, *, every: int) -> None:
    axes.set_yticks(range(0, len(values), every), [str(v) for v in values[::every]])
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_ylabel(name)


def curves(found: Mapping[str, Curve], measured: Mapping[str, tuple[float, float]]) -> str:
    """Hit rate against cache size; a dot is what a run itself had."""
    styles = ("-", "-.", "--", ":")
    canvas = Canvas(3.2)
    with canvas as (axes,):
        for index, (name, curve) in enumerate(found.items()):
            for style, (policy, rates) in zip(styles, curve.rates.items(), strict=False):
                label = f"{_label(name)}: {policy.value}"
                percent = [100 * rate for rate in rates]
                axes.plot(curve.mib, percent, style, color=colour(index), label=label, lw=1.4)
            if name in measured:
                mib, rate = measured[name]
                label = f"{_label(name)}: measured"
                axes.plot([mib], [100 * rate], "o", color=colour(index), label=label)
        axes.set(xlabel="cache, MiB", ylabel="hits, %", xlim=(0, None), ylim=(0, 102))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
    return canvas.svg


def by_layer(found: Mapping[str, ByLayer]) -> str:
    """Agreement with the router by layer, a line each."""
    canvas = Canvas(2.8)
    with canvas as (axes,):
        for index, (name, layers) in enumerate(found.items()):
            percent = [100 * share for share in layers.values()]
            shown = colour(index)
            axes.plot([*layers], percent, "o-", ms=3, lw=1, color=shown, label=_label(name))
        axes.set(xlabel="layer", ylabel="slots that agree, %", ylim=(0, 102))
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right", ncols=2)
    return canvas.svg


def heat(found: HotExperts) -> str:
    """Layer by expert: how many of the decoded tokens used it."""
    rows = len(found.layers)
    canvas = Canvas(1.2 + 0.14 * min(max(rows, 6), 64))
    with canvas as (axes,):
        image = axes.imshow(
            100 * found.share, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0
        )
        _rows(axes, found.layers, "layer", every=1 + rows // 25)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xlabel("expert")
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
        bar.set_label("% of tokens")
    return canvas.svg
