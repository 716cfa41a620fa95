"""`routeahead run` on the packed file of a model, as a cell beside the model itself.

    routeahead pack MODEL.gguf MODEL.packed.gguf
    routeahead bench MODEL.gguf --cells benchmarks/cells/pack.half.txt

A bench gives every cell the same model; this one takes the file beside it whose name ends in
`.packed.gguf`. All else is `routeahead run`'s, also the report.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    model, *flags = sys.argv[1:]
    packed = Path(model).with_suffix(".packed.gguf")
    if not packed.is_file():
        raise SystemExit(f"{packed}: not there: routeahead pack {model} {packed}")
    os.execv(
        sys.executable,
        [sys.executable, "-m", "routeahead.cli.main", "run", str(packed), *flags],
    )


if __name__ == "__main__":
    main()
