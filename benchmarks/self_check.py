"""Checks that the bench sees a difference that is there, and no other.

    python benchmarks/self_check.py MODEL --flags '--cache-mb 512'

Each try is a whole benchmark of three cells: a run, the same again, and the same with 5 ms more a
token (`delayed_run.py`). It is right if the second is no win and no loss, and the third is a loss.
Exit status 1 unless every try was right.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routeahead.bench.cells import CellList, parse_cell
from routeahead.bench.runs import Bench, Plan
from routeahead.bench.statistics import Ratio
from routeahead.bench.summary import SPEED, CellSummary, summarise
from routeahead.llamacpp.gguf_file import read_layout

DELAYED_RUN = Path(__file__).with_name("delayed_run.py")
EXPECTED = {"same": "no difference shown", "late": "loss"}


def main() -> None:
    arguments = parse()
    right = 0
    for seed in range(arguments.tries):
        same, late = one_try(arguments, seed)
        right += same[0] == EXPECTED["same"] and late[0] == EXPECTED["late"]
        shown = f"same: {' '.join(same)}; late: {' '.join(late)}"
        print(f"try {seed + 1}: {shown}; {right} right so far", flush=True)
    print(f"{right} of {arguments.tries} tries were right")
    sys.exit(right != arguments.tries)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--flags", default="", help="of `routeahead run`, for all three cells")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="what the third cell gets more")
    parser.add_argument("--tries", type=int, default=20)
    # Of fifteen pairs two may disagree, of the least number for a claim (ten) none: then a single
    # disturbance by another user of the machine would void a try.
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=Plan.tokens)
    parser.add_argument("--warmup", type=int, default=Plan.warmup)
    parser.add_argument("-t", "--threads", type=int, help="compute threads")
    return parser.parse_args()


def one_try(arguments: argparse.Namespace, seed: int) -> list[tuple[str, str]]:
    """(verdict, ratio) of the second and the third cell."""
    late = f"late: DELAY_MS={arguments.delay_ms} '{DELAYED_RUN}' {arguments.flags}"
    texts = (f"plain: {arguments.flags}", f"same: {arguments.flags}", late)
    plan = Plan(
        passes=arguments.passes,
        tokens=arguments.tokens,
        warmup=arguments.warmup,
        threads=arguments.threads,
        seed=seed,
    )
    cells = CellList("", [parse_cell(text) for text in texts])
    benchmark = Bench(read_layout(arguments.model), cells, plan)
    for run in benchmark:
        if run.error:
            sys.exit(f"{run.cell}: {run.error}")
    _, *others = summarise(benchmark.runs, ["plain", *EXPECTED], "plain", arguments.warmup)
    return [outcome(one) for one in others]


def outcome(summary: CellSummary) -> tuple[str, str]:
    speed = summary.ratios[SPEED]
    assert isinstance(speed, Ratio), speed
    interval = "" if speed.low is None else f"{speed.low:.3f}..{speed.high:.3f}"
    return speed.verdict, f"{speed.median:.3f} [{interval}]"


if __name__ == "__main__":
    main()
