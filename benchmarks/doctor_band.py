"""Whether runs lie in the band that `routeahead doctor` forecasts, in random cells.

    python benchmarks/make_model.py qwen-12.gguf --layers 12
    python benchmarks/doctor_band.py qwen-12.gguf=qwen.route.csv src/routeahead/models/default.gguf

Each cell draws a model, the share of its experts that the cache holds, and a throttle (none in one
of three) from the seed; the doctor is asked, then the model is run, as `bench --against-doctor`
does, so that ten seconds lie between the two. Both follow the same recorded routing: the one behind
the model's `=`, or one that is recorded here with random tokens. Ten cells take about six minutes.
Exit status 1 if less than nine of ten lie inside.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.telemetry.route_trace import read_trace

CLI = [sys.executable, "-m", "routeahead.cli.main"]
TOKENS, WARMUP = 48, 24
SLOWEST_S = 0.6  # of a token without a cache: a slower disk makes the cells long, and no harder
FASTEST = 1500 * MIB  # bytes a second: a higher throttle would not slow this disk down
UNTHROTTLED = 1 / 3


@dataclass(frozen=True)
class Subject:
    """A model, the routing that it follows, and the flag that makes its top-k the routing's."""

    model: Path
    trace: Path
    top_k: int

    def cell(self, rng: random.Random) -> list[str]:
        """Flags of a random way to run it."""
        layout = read_layout(self.model)
        least = layout.token_bytes(self.top_k)
        share = rng.uniform(least / layout.expert_bytes, 0.9)
        flags = ["--cache-mb", str(-(-int(share * layout.expert_bytes) // MIB))]
        if rng.random() >= UNTHROTTLED:
            slowest = least / SLOWEST_S
            rate = slowest * (FASTEST / slowest) ** rng.random()
            flags += ["--throttle", f"{rate / MIB:.0f}"]
        if self.top_k != layout.n_expert_used:
            flags += ["--n-expert-used", str(self.top_k)]
        return [*flags, "--replay-routing", str(self.trace)]


def subject(text: str, folder: Path) -> Subject:
    model, _, given = text.partition("=")
    trace = Path(given) if given else folder / f"{Path(model).stem}.csv"
    if not given:
        count = str(TOKENS + WARMUP + 2)
        subprocess.run(
            [*CLI, "run", model, "--forced-tokens", "seed:1", "-n", count, "--route-trace", trace],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return Subject(Path(model), trace, int(read_trace(trace).slots[:, 3].max()) + 1)


def measure(one: Subject, flags: list[str], threads: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "bench.json"
        line = [*CLI, "bench", str(one.model), "--cell", f"cell:{' '.join(flags)}"]
        line += ["--tokens", str(TOKENS), "--warmup", str(WARMUP), "--passes", "1"]
        line += ["--against-doctor", "--json", str(record)]
        line += ["-t", threads] if threads else []
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        content = json.loads(record.read_text())
    told, figures = content["doctor"]["cell"], content["summary"][0]["figures"]
    return {
        "model": one.model.name,
        "flags": flags[: flags.index("--replay-routing")],
        "decode": told["forecast"]["decode"],
        "hit_rate": [told["traffic"]["hit_rate"], figures["hit_rate"]["median"]],
        "disk_mib_per_s": told["disk"]["bandwidth"] / MIB,
        "hot_s": told["engine"]["hot_s"],
        "streamed": told["streamed"],
        "drift": told["disk"]["drift"],
        "disk_at_the_run_mib_per_s": content["runs"][0]["machine"]["disk"]["mib_per_s"],
        "run": figures["tok_per_s"]["median"],
        "compute_ms": figures["compute_ms"]["median"],
        "stall_ms": figures["stall_ms"]["median"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", metavar="MODEL[=TRACE]")
    parser.add_argument("--cells", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng, rows = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        subjects = [subject(text, Path(folder)) for text in arguments.model]
        for _ in range(arguments.cells):
            one = rng.choice(subjects)
            row = measure(one, one.cell(rng), arguments.threads)
            band = row["decode"]
            row["inside"] = band["low"] <= row["run"] <= band["high"]
            rows.append(row)
            print(
                f"{row['model']} {' '.join(row['flags'])}: forecast {band['value']:.2f} "
                f"({band['low']:.2f} to {band['high']:.2f}), run {row['run']:.2f} tok/s "
                f"({row['run'] / band['value'] - 1:+.0%}): "
                f"{'inside' if row['inside'] else 'OUTSIDE'}; disk {row['disk_mib_per_s']:.0f} "
                f"(drift {row['drift']:+.0%}), then {row['disk_at_the_run_mib_per_s']:.0f} MiB/s",
                flush=True,
            )
    inside = sum(row["inside"] for row in rows)
    off = sorted(abs(row["run"] / row["decode"]["value"] - 1) for row in rows)
    width = sorted(row["decode"]["high"] / row["decode"]["low"] for row in rows)
    print(
        f"{inside} of {len(rows)} inside; off by {off[len(off) // 2]:.0%} (median), "
        f"{off[-1]:.0%} at most; a band's ends differ by a factor of {width[len(width) // 2]:.2f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(0 if inside >= 0.9 * len(rows) else 1)


if __name__ == "__main__":
    main()
