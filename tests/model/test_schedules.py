"""Random schedules (`support.schedules`): every row of logits is right, or there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.schedules import POLICIES, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_schedules(tmp_path: Path, packed: bool) -> None:
    counts = run(tmp_path, loads=2 * len(POLICIES), each=8, seed=1, packed=packed)
    assert counts["compared"] > 40 and counts["struck"] > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_schedules(tmp_path: Path, seed: int, packed: bool) -> None:
    """2,520 for each seed, which `pytest -n` may spread."""
    counts = run(tmp_path, loads=42, each=60, seed=100 + seed, packed=packed)
    print(f"seed {seed}: {counts}")
    assert counts["compared"] > 1300 and counts["struck"] > 100
