"""Measures what docs/measurements.md says of a model.

    python benchmarks/measurements.py MODEL OUT

Runs `routeahead` once for each figure and leaves a JSON file for each question in OUT. A file that
is there already is kept, so an interrupted measurement continues. Then `measurements_page.py`
writes the page.

| file | what |
|---|---|
| text.json | perplexity and divergence of each setting on held-out text, fed through decode |
| answers.json, decoded.json | exact answers, prompts as prefill and through decode |
| agreement.json | what route-ahead and the router agreed on, by layer and depth, on held-out text |
| speed.json | interleaved runs of each setting, fed the held-out text |
| about.json | the model, the versions and the machine |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cli_json import cli_json

from routeahead.bench.cells import expand_shares, parse_cell, read_list
from routeahead.bench.machine_state import describe
from routeahead.evaluation.corpus import open_vocabulary
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.telemetry.json_file import write_json

HERE = Path(__file__).parent
SETTINGS = HERE / "settings/measurements.txt"
HELD_OUT, BATTERY = HERE / "data/held-out.txt", HERE / "data/battery.jsonl"
LOSSLESS = ("prefetch", "predicted")  # beside the stream: how their settings' names begin
TEXT_TOKENS = 2000
FED_TOKENS = 1000  # of runs that are fed the held-out text
# Below every disk's own speed, so that reads cost the same on all of them.
THROTTLE_MIB_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--passes", type=int, default=8, help="runs of each setting for its speed; 0: none"
    )
    arguments = parser.parse_args()
    scratch = arguments.out / "work"
    scratch.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(arguments.model, scratch, arguments.passes)
    for name, measure in measurement.questions.items():
        path = arguments.out / f"{name}.json"
        if not path.exists():
            print(f"--- {name}", file=sys.stderr, flush=True)
            write_json(path, measure())
        elif name == "about" and json.loads(path.read_text())["of"] != measurement.of:
            raise SystemExit(f"{arguments.out}: of another model, list or data: delete it")
    shutil.rmtree(scratch)


class Measurement:
    """The measurement of one model.

    Attributes:
        of: digests of everything that the figures depend on but the machine.
        questions: name of a file → what measures its content.
    """

    def __init__(self, model: Path, scratch: Path, passes: int) -> None:
        self._model, self._scratch, self._passes = model, scratch, passes
        self._layout = read_layout(model)
        self._settings = [parse_cell(line) for line in read_list(SETTINGS)[1]]
        files = (model, SETTINGS, HELD_OUT, BATTERY)
        self.of = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        self._ids = scratch / "held-out.ids"
        with open_vocabulary(model) as vocabulary:
            tokens = vocabulary.tokens(HELD_OUT.read_text(encoding="utf-8"), prompt=False)
        self._ids.write_text(" ".join(map(str, tokens[:FED_TOKENS])))
        self.questions: dict[str, Callable[[], Any]] = {
            "about": self._about,
            "agreement": self._agreement,
            "text": lambda: self._eval(
                "text", "--text", HELD_OUT, "-c", 512, "--max-tokens", TEXT_TOKENS
            ),
            "answers": lambda: self._ask("answers"),
            "decoded": lambda: self._ask("decoded", "--prompt-through-decode"),
        }
        if passes:
            self.questions["speed"] = self._speed

    def _about(self) -> dict[str, Any]:
        layout, machine = self._layout, describe()
        del machine["system"]
        return {
            "model": {
                "name": layout.metadata.get("general.name"),
                "architecture": layout.arch,
                "file_bytes": layout.file_bytes,
                "expert_bytes": layout.expert_bytes,
                "layers": len(layout.moe_layers),
                "experts": layout.n_expert,
                "top_k": layout.n_expert_used,
            },
            "machine": machine,
            "of": self.of,
        }

    def _ask(self, name: str, *arguments: object) -> Any:
        """The battery. Lossless settings are not asked: their logits on text are the resident's."""
        question, lines = read_list(SETTINGS)
        lossy = [line for line in lines if not line.startswith(LOSSLESS)]
        listed = self._scratch / "lossy.txt"
        listed.write_text("\n".join([f"# {question}", *lossy]))
        return self._eval(name, "--prompts", BATTERY, *arguments, settings=listed)

    def _eval(self, name: str, *arguments: object, settings: Path = SETTINGS) -> Any:
        more = ("--settings", settings, "-t", 1, "--work", self._scratch / name)
        # Results alone: the rest of the record names folders of this machine.
        return {"results": cli_json("eval", self._model, *arguments, *more)["results"]}

    def _agreement(self) -> dict[str, Any]:
        found = {}
        for depth, flags in self._depths():
            counts = self._run(flags, "--forced-tokens", self._ids, "-n", FED_TOKENS)["route_ahead"]
            if counts["passed_through"] or counts["disarmed"]:
                raise SystemExit(f"route-ahead {depth} did not commit everything: {counts}")
            found[depth] = counts
        return found

    def _depths(self) -> Iterator[tuple[str, list[str]]]:
        """Depths of route-ahead alone, with the flags."""
        for name, flags in self._flags():
            if name.startswith("ahead-") and "+" not in name:
                yield name.removeprefix("ahead-"), flags

    def _flags(self) -> Iterator[tuple[str, list[str]]]:
        for cell in self._settings:
            yield cell.name, expand_shares(cell.flags, self._layout)

    def _speed(self) -> Any:
        """The bench's record without the runs' own reports, which are long."""
        cells = self._scratch / "cells.txt"
        more = f"--forced-tokens {self._ids} --throttle {THROTTLE_MIB_S}"
        lines = [f"{cell.name}: {' '.join(cell.flags)} {more}" for cell in self._settings]
        cells.write_text("\n".join(["# speed of each setting", *lines]) + "\n")
        counts = ("--tokens", 128, "--warmup", 32, "--passes", self._passes, "-t", 1)
        record = cli_json("bench", self._model, "--cells", cells, *counts)
        return {"throttle_mib_s": THROTTLE_MIB_S, "summary": record["summary"]}

    def _run(self, flags: list[str], *arguments: object) -> Any:
        return cli_json("run", self._model, *flags, *arguments, "-t", 1, "-c", 1024)


if __name__ == "__main__":
    main()
