"""Writes docs/measurements.md, its plots and the README's table from what measurements.py left.

    python benchmarks/measurements_page.py docs

Each folder in docs/measurements is one model's. Nothing is measured here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measurements_model import MIB, Model, read_models
from measurements_plots import draw

TEMPLATE = Path(__file__).with_suffix(".md")
README_SETTINGS = (
    "stream", "ahead-1", "ahead-2", "ahead-4", "drop-0.5", "substitute-0.1", "used-3",
)  # fmt: skip
_BLOCK = re.compile(r"(<!-- measurements -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    docs = Path(sys.argv[1])
    models = read_models(docs)
    draw(models, docs / "measurements")
    (docs / "measurements.md").write_text(page(models), encoding="utf-8")
    readme = docs.parent / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), models[0]), encoding="utf-8")


def page(models: Sequence[Model]) -> str:
    machine = models[0].about["machine"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        models=_models_table(models),
        cores=machine["cores"],
        processor=machine["processor"],
        llama=machine["llama_cpp_python"],
        throttle=models[0].throttle,
        sections="\n\n".join(map(_section, models)),
        firsts="\n".join(map(_first_layers, models)),
    )


def with_table(readme: str, model: Model) -> str:
    """The README with the table between its two marks."""
    shown = [name for name in README_SETTINGS if name in model.settings]
    table = _table(
        ("setting", "perplexity × resident's", "right answers", "MiB read a token", "tokens/s ×"),
        [
            (
                flags(model, name),
                f"{model.perplexity_ratio(name):.3f}",
                _right(model.decoded[name]),
                f"{model.mib_per_token(name):.2f}",
                f"{model.speed_ratio(name):.2f}",
            )
            for name in shown
        ],
    )
    return _BLOCK.sub(lambda match: f"{match[1]}{table}\n{match[2]}", readme)


def flags(model: Model, name: str) -> str:
    """What the setting adds to the lossless stream, as on a command line."""
    stream, found = model.text["stream"]["settings"], []
    for key, value in model.text[name]["settings"].items():
        if value != stream[key]:
            option = f"--{key.replace('_', '-')}"
            found.append(option if value is True else f"{option} {value:g}")
    return f"`{' '.join(found)}`" if found else "none"


def _models_table(models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        about = model.about["model"]
        experts = f"{about['layers']} × {about['experts']}, top-{about['top_k']}"
        size, share = about["file_bytes"] / MIB, about["expert_bytes"] / about["file_bytes"]
        cache = model.text["stream"]["settings"]["cache_mb"]
        cached = f"{cache} MiB, {cache * MIB / about['expert_bytes']:.0%} of the experts"
        row = (
            model.name,
            about["architecture"],
            experts,
            f"{size:.1f} MiB",
            f"{share:.0%}",
            cached,
        )
        rows.append(row)
    header = ("model", "architecture", "layers × experts", "file", "of it experts", "cache")
    return _table(header, rows)


def _section(model: Model) -> str:
    return "\n\n".join(
        [
            f"## {model.about['model']['name']} ({model.name})",
            _settings_table(model),
            _kinds(model),
            f"![Perplexity against bytes and speed](measurements/{model.name}-cost.svg)",
            "### Route-ahead by depth",
            _depths(model),
            f"![Agreement by layer, perplexity by depth](measurements/{model.name}-depth.svg)",
            _agreement(model),
        ]
    )


def _settings_table(model: Model) -> str:
    header = (
        "setting", "flags", "perplexity ×", "KL", "top-1", "right answers", "MiB/token",
        "tokens/s × stream's",
    )  # fmt: skip
    rows = []
    for name in model.settings:
        text = model.text[name]["text"]
        rows.append(
            (
                name,
                flags(model, name),
                f"{model.perplexity_ratio(name):.4f}",
                f"{text['kl_mean']:.4f}",
                f"{text['agreement']:.1%}",
                _asked_twice(model, name),
                f"{model.mib_per_token(name):.2f}",
                _speed(model, name),
            )
        )
    resident = model.text["baseline"]["text"]
    return (
        f"Resident: perplexity {resident['perplexity']:.2f} over {resident['tokens']} tokens; "
        f"{_right(model.answers['baseline'])} answers right, "
        f"{_right(model.decoded['baseline'])} with the prompt through decode.\n\n"
        f"{_table(header, rows)}"
    )


def _asked_twice(model: Model, name: str) -> str:
    if name not in model.answers:
        return ""
    return f"{_right(model.answers[name])} / {_right(model.decoded[name])}"


def _speed(model: Model, name: str) -> str:
    if not model.speed:
        return ""
    if name == "stream":
        return f"1 ({model.speed[name]['figures']['tok_per_s']['median']:.0f} tok/s)"
    ratio = model.speed[name]["ratios"]["tok_per_s"]
    known = ratio["low"] is not None  # too few passes give no interval
    interval = f" ({ratio['low']:.2f}..{ratio['high']:.2f})" if known else ""
    return f"{ratio['median']:.2f}{interval}"


def _kinds(model: Model) -> str:
    """Right answers by kind, for the resident run and each depth, prompts through decode."""
    kinds = list(model.decoded["baseline"]["answers"])
    shown = ["baseline", *(f"ahead-{depth}" for depth in model.agreement)]
    rows = [
        (
            "resident" if name == "baseline" else name,
            *(f"{right}/{asked}" for right, asked in model.decoded[name]["answers"].values()),
        )
        for name in shown
    ]
    return "Right answers by kind, prompts through decode:\n\n" + _table(("setting", *kinds), rows)


def _depths(model: Model) -> str:
    rows = []
    for depth in model.agreement:
        name = f"ahead-{depth}"
        by_layer = model.agreement[depth]["by_layer"]
        rows.append(
            (
                depth,
                f"{sum(one['slots'] > 0 for one in by_layer.values())} of {len(by_layer)}",
                _percent(model.agreed(depth)),
                f"{model.perplexity_ratio(name):.4f}",
                f"{model.text[name]['text']['kl_mean']:.4f}",
            )
        )
    header = ("N", "layers committed", "slots agreed", "perplexity ×", "KL")
    return _table(header, rows)


def _agreement(model: Model) -> str:
    layers = list(next(iter(model.agreement.values()))["by_layer"])
    rows = [
        (depth, *(_percent(model.agreed(depth, layer), digits=0) for layer in layers))
        for depth in model.agreement
    ]
    return (
        "Slots on which the committed selection agreed with the router, by layer (columns) and N "
        f"(rows):\n\n{_table(('N', *layers), rows)}"
    )


def _first_layers(model: Model) -> str:
    """Agreement of what is predicted from the first MoE layer's input, and of all the rest."""
    layers = list(next(iter(model.agreement.values()))["by_layer"])
    firsts, others = list[float](), list[float]()
    for depth in model.agreement:
        for index, layer in enumerate(layers):
            share = model.agreed(depth, layer)
            if share is not None:
                (firsts if index == int(depth) else others).append(share)
    return (
        f"  on the model *{model.name}* it agrees on {_range(firsts)} of slots, the rest on "
        f"{_range(others)}."
    )


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%}"


def _right(summary: dict[str, Any]) -> str:
    right, asked = (sum(column) for column in zip(*summary["answers"].values(), strict=True))
    return f"{right}/{asked}"


def _percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{share:.{digits}%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
