"""Writes the figures of docs/calibration.md, its plots and the README's table of speeds.

    python benchmarks/calibration_page.py docs [RECORD.json ...]

Records are what `routeahead eval --json` and `routeahead bench --json` wrote (docs/calibration.md
has the commands): what is shown of them is kept in docs/calibration. Agreements stand in the
calibrated routers in benchmarks/data. Nothing is measured here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from page_blocks import markdown, median, speed, write

from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.tensor_file import read_tensors

mpl.rcParams["svg.hashsalt"] = "routeahead"  # the same figures give the same file
HERE = Path(__file__).parent
MIB = 1 << 20
MODELS = ("embedded", "second", "third")
README_INTRODUCTION = (
    "Speed and quality in one model: the built-in one at Qwen3-30B-A3B's widths, padded with zeros "
    "(`make calibration`), three quarters of the experts cached, a throttled disk; *ahead-2* is "
    "`--route-ahead 2`, *gates* means calibrated, *skip* and *candidates* those settings. By "
    "the time that missed reads take over the time that a token computes:"
)
RHOS = ("0.6", "0.9", "1.5")


def main() -> None:
    docs = Path(sys.argv[1])
    for record in map(Path, sys.argv[2:]):
        write_json(docs / "calibration" / record.name, kept(json.loads(record.read_text())))
    found = {name: gates for name in MODELS if (gates := agreements(name))}
    for name, gates in found.items():
        plot(gates).savefig(docs / "calibration" / f"{name}.svg", metadata={"Date": None})
    write(docs / "calibration.md", "agreement", agreement_tables(found))
    quality = {name: read(docs, name) for name in MODELS}
    write(docs / "calibration.md", "quality", quality_tables(quality))
    write(docs / "calibration.md", "same", same_table(docs))
    table = decision_table(docs)
    if table:
        write(docs / "calibration.md", "decision", table)
        write(docs.parent / "README.md", "decision", f"{README_INTRODUCTION}\n\n{table}")


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a record, without the runs' own reports and the names of folders."""
    if "summary" not in record:
        return {"results": record["results"]}
    [throttle] = {
        float(found[1])
        for cell in record["cells"]
        if (found := re.search(r"--throttle (\S+)", " ".join(cell["flags"])))
    }
    return {"throttle_mib_s": throttle, "summary": record["summary"]}


def read(docs: Path, name: str) -> Any:
    """A record in docs/calibration; None if it was not made."""
    path = docs / "calibration" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# --- agreement, by layer ---


def agreements(model: str) -> list[dict[str, Any]]:
    """What the calibration counted on its held-out documents: a row for each layer and depth."""
    path = HERE / "data" / f"{model}.gates.safetensors"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = read_tensors(path)[1]["gates"]
    return rows


def agreement_tables(found: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    for name, gates in found.items():
        depths = sorted({gate["depth"] for gate in gates})
        layers = sorted({gate["layer"] for gate in gates})
        at = {(gate["layer"], gate["depth"]): gate for gate in gates}
        header = ("layer", *(f"N = {depth}: stale → calibrated" for depth in depths))
        rows = [
            (str(layer), *(shown(at.get((layer, depth))) for depth in depths)) for layer in layers
        ]
        rows.append(("all", *(mean([g for g in gates if g["depth"] == d]) for d in depths)))
        parts.append(
            f"*{name}*\n\n{markdown(header, rows)}\n\n"
            f"![Agreement by layer, {name} model](calibration/{name}.svg)\n"
        )
    return "\n".join(parts)


def shown(gate: dict[str, Any] | None) -> str:
    return f"{gate['stale']:.0%} → {gate['agreement']:.0%}" if gate else ""


def mean(gates: Sequence[dict[str, Any]]) -> str:
    stale, fitted = (sum(g[key] for g in gates) / len(gates) for key in ("stale", "agreement"))
    return f"{stale:.1%} → {fitted:.1%}"


def plot(gates: Sequence[dict[str, Any]]) -> Figure:
    """A panel a depth: agreement by layer of the layers' own routers and of the calibrated."""
    depths = sorted({gate["depth"] for gate in gates})
    figure = Figure(figsize=(3.4 * len(depths), 3.2), layout="constrained")
    for depth, axes in zip(depths, figure.subplots(1, len(depths), sharey=True), strict=True):
        of = sorted((g for g in gates if g["depth"] == depth), key=lambda g: g["layer"])
        layers = [gate["layer"] for gate in of]
        axes.plot(layers, [gate["stale"] for gate in of], "o-", color="0.6", label="stale")
        fitted = [gate["agreement"] for gate in of]
        axes.plot(layers, fitted, "o-", color="tab:blue", label="calibrated")
        axes.set_title(f"N = {depth}", fontsize=10)
        axes.set_xlabel("MoE layer")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        if depth == depths[0]:
            axes.set_ylabel("slots agreed with the router")
            axes.legend(frameon=False, fontsize=8)
    return figure


# --- quality ---


def quality_tables(records: dict[str, Any]) -> str:
    parts = []
    for name, record in records.items():
        if record:
            baseline, *results = record["results"]
            text, answers = baseline["text"], right(baseline)
            header = ("setting", "perplexity ×", "KL", "top-1", "right answers")
            # A model that was not trained for the tasks has no answers.
            columns = len(header) if answers else -1
            rows = [quality_row(one, baseline)[:columns] for one in results]
            parts.append(
                f"*{name}* (resident: perplexity {text['perplexity']:.2f} over {text['tokens']} "
                f"tokens{f', {answers} answers' if answers else ''})\n\n"
                f"{markdown(header[:columns], rows)}\n"
            )
    return "\n".join(parts)


def quality_row(one: dict[str, Any], baseline: dict[str, Any]) -> tuple[str, ...]:
    text = one["text"]
    ratio = text["perplexity"] / baseline["text"]["perplexity"]
    return (
        one["name"], f"{ratio:.4f}", f"{text['kl_mean']:.4f}", f"{text['agreement']:.1%}",
        right(one),
    )  # fmt: skip


def right(one: dict[str, Any]) -> str:
    if not one.get("answers"):
        return ""
    found, asked = (sum(column) for column in zip(*one["answers"].values(), strict=True))
    return f"{found}/{asked}"


def same_table(docs: Path) -> str:
    """The embedded model beside the inflated one; empty if they were not measured."""
    rows = []
    for name in ("embedded", "inflated"):
        record = read(docs, f"{name}-check")
        if not record:
            return ""
        resident, ahead = (one["text"]["perplexity"] for one in record["results"])
        rows.append((name, f"{resident:.4f}", f"{ahead:.4f}"))
    return markdown(("model", "perplexity, resident", "with `--route-ahead 2`"), rows)


# --- what a user decides by ---


def decision_table(docs: Path) -> str:
    """Each setting's speed on the inflated model, and its quality on the one that was inflated;
    empty if it was not measured."""
    quality = read(docs, "inflated-quality")
    speeds = {rho: one for rho in RHOS if (one := read(docs, f"inflated-rho-{rho}"))}
    if not (quality and speeds):
        return ""
    baseline, *results = quality["results"]
    graded = {one["name"]: one for one in results}
    by_rho = {rho: {c["name"]: c for c in one["summary"]} for rho, one in speeds.items()}
    names = list(next(iter(by_rho.values())))
    header = (
        "setting", "perplexity ×", "right answers", "MiB/token",
        *(
            f"tokens/s ×, reads ÷ compute = {reads_to_compute(speeds[rho], cells):.2f}"
            for rho, cells in by_rho.items()
        ),
    )  # fmt: skip
    first, rows = next(iter(by_rho.values())), []
    for name in names:
        row = quality_row(graded[name], baseline)
        ratios = [speed(cells[name]) for cells in by_rho.values()]
        rows.append((name, row[1], row[-1], f"{median(first[name], 'mib_per_token'):.1f}", *ratios))
    return markdown(header, rows)


def reads_to_compute(record: dict[str, Any], cells: dict[str, Any]) -> float:
    """Time that the lossless stream's missed bytes take, over the time that its token computes."""
    read_ms = 1e3 * median(cells["stream"], "mib_per_token") / record["throttle_mib_s"]
    return read_ms / median(cells["stream"], "compute_ms")


if __name__ == "__main__":
    main()
