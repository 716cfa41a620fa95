"""What measurements.py left of one model, as figures for the page and its plots."""

from __future__ import annotations

import json
from pathlib import Path

MIB = 1 << 20


class Model:
    """The measurements of one model.

    Attributes:
        name: of its folder.
        about, agreement: the files' content.
        text, answers, decoded: by setting. `baseline` is the resident run; lossless settings were
            not asked for answers.
        throttle: MiB/s that the runs of `speed` read at most.
        speed: summary of the bench, by setting; empty if it was not run.
    """

    def __init__(self, folder: Path) -> None:
        files = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        self.name = folder.name
        self.about, self.agreement = files["about"], files["agreement"]
        speed = files.get("speed", {"throttle_mib_s": 0, "summary": []})
        self.throttle = speed["throttle_mib_s"]
        self.speed = {one["name"]: one for one in speed["summary"]}
        self.text, self.answers, self.decoded = (
            {one["name"]: one for one in files[name]["results"]}
            for name in ("text", "answers", "decoded")
        )
        self.settings = [name for name in self.text if name != "baseline"]

    def perplexity_ratio(self, name: str) -> float:
        """To the resident run's."""
        baseline = self.text["baseline"]["text"]["perplexity"]
        return float(self.text[name]["text"]["perplexity"] / baseline)

    def mib_per_token(self, name: str) -> float:
        return float(self.text[name]["cost"]["bytes_per_token"] / MIB)

    def speed_ratio(self, name: str) -> float:
        """Tokens a second, to the lossless stream's."""
        return 1.0 if name == "stream" else self.speed[name]["ratios"]["tok_per_s"]["median"]

    def agreed(self, depth: str, layer: str | None = None) -> float | None:
        """Share of slots, of one layer or of all that were committed."""
        counts = self.agreement[depth]
        counts = counts["by_layer"][layer] if layer else counts
        return counts["agreed_slots"] / counts["slots"] if counts["slots"] else None


def read_models(docs: Path) -> list[Model]:
    """All models in docs/measurements; the embedded one comes first."""
    folders = [path for path in (docs / "measurements").iterdir() if path.is_dir()]
    return sorted(map(Model, folders), key=lambda one: one.name != "embedded")
