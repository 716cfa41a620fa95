"""Writes held-out tasks for `routeahead eval --prompts`: `python training/battery.py OUT.jsonl`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tasks import battery


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":", maxsplit=1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=100, help="items of each kind")
    arguments = parser.parse_args()
    lines = [
        json.dumps({"prompt": one.prompt, "answer": one.answer.strip(), "kind": one.kind})
        for one in battery(arguments.each)
    ]
    arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
