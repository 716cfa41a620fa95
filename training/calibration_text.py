"""Writes documents to calibrate the trained models on: `calibration_text.py OUT.jsonl`.

They are of what the models were trained on, in the same shares, and nothing of it is held out: the
battery and the held-out text stay what nobody has seen.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from corpus import documents
from tasks import KINDS, item

TASKS, TEXTS = 800, 300
CHARACTERS = 1000  # of a text, from its beginning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    rng = random.Random("calibration")
    texts = [one.text for one in documents() if not one.held and len(one.text) > CHARACTERS]
    found = [text[:CHARACTERS] for text in rng.sample(texts, TEXTS)]
    for number in range(TASKS):
        one = item(KINDS[number % len(KINDS)], rng, held=False)
        found.append(one.prompt + one.answer)
    rng.shuffle(found)
    out.write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    print(f"{out}: {len(found)} documents, {sum(map(len, found))} characters")


if __name__ == "__main__":
    main()
