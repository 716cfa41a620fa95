"""Writes the model that ships until a trained one does: random weights, printable noise.

python training/placeholder.py src/routeahead/models/default.gguf
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

import gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import models

FIRST_BYTE_TOKEN = 3  # the vocabulary is three special tokens, then one token a byte
PRINTABLE = {FIRST_BYTE_TOKEN + byte for byte in (string.ascii_lowercase + " ").encode()}


def silence_unprintable(path: Path) -> None:
    """Zeroes the output rows of all tokens but letters and blanks, so that none of them wins."""
    reader = gguf.GGUFReader(path, "r+")
    rows = next(t for t in reader.tensors if t.name == "output.weight").data
    for token in range(len(rows)):
        if token not in PRINTABLE:
            rows[token] = 0
    rows.flush()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    models.write(target, models.FIXTURES["qwen3moe"])
    silence_unprintable(target)
