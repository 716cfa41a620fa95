"""A routing trace without its prompt: `python benchmarks/trim_trace.py trace.csv short.csv`.

The prompt's last token stays as a prompt of one, and decoded tokens follow at position 1. Replaying
a long prompt reads most of a model's experts before the first decoded token: at 48 layers of a 30B
model 12 GB, which says nothing about decode and takes the disk's burst away.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    lines = source.read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    first = min(int(row["step"]) for row in rows if row["phase"] == "1")
    with target.open("w", newline="") as file:
        file.write("\n".join(comments) + "\n")
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        for row in rows:
            step = int(row["step"]) - first + 1
            if step >= 0:
                table.writerow(row | {"step": step})


if __name__ == "__main__":
    main()
