"""A policy of one's own, through `run`, `bench` and `eval`, and what happens if it is wrong."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = "examples.swap_policy:Swap"
ROOT = Path(__file__).parents[2]
