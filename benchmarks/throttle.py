"""Prints the throttle, in MiB/s, at which a token's reads take RHO times as long as it computes.

    routeahead bench MODEL --cell "stream: --cache-mb {75%}" -t 1 --json RECORD.json
    python benchmarks/throttle.py RECORD.json RHO

RECORD's first cell says how much a token reads and how long it computes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from page_blocks import median


def main() -> None:
    record, rho = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), float(sys.argv[2])
    cell = record["summary"][0]
    print(round(1e3 * median(cell, "mib_per_token") / (rho * median(cell, "compute_ms"))))


if __name__ == "__main__":
    main()
