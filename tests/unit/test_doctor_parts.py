"""The parts of a forecast: the time model at its ends, the curves, how memory is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routeahead.config import Settings
from routeahead.doctor import disk_probe
from routeahead.doctor.disk_probe import Throttle, probe_disk, scratch_file, slices_in
from routeahead.doctor.memory import Memory, divide
from routeahead.doctor.routing_curve import nearest_curve, routing_curves
from routeahead.engine.budget import HEADROOM
from routeahead.experts.layout import MIB, ModelLayout, Shard, TensorInfo
from routeahead.replay.time_model import PROJECTIONS, Machine, simulate_rate

LAYERS, EXPERTS, TOP_K = 4, 16, 2
SLICE = 1 << 20


def layout(context: int = 1 << 15) -> ModelLayout:
    """48 MiB of experts a layer, 8 MiB of dense weights."""
    tensors = [TensorInfo("output.weight", "F32", (1, 1), 0, 0, 8 * MIB)]
    tensors += [
        TensorInfo(f"blk.{n}.ffn_{part}_exps.weight", "F32", (1, 1, EXPERTS), 0, 0, EXPERTS * SLICE)
        for n in range(LAYERS)
        for part in ("gate", "up", "down")
    ]
    facts = {"general.architecture": "x", "x.expert_used_count": TOP_K, "x.context_length": context}
    return ModelLayout([Shard(Path("m.gguf"), 1)], tensors, facts)


class TestTimeModel:
    machine = Machine(bandwidth=100 * MIB, compute_s=0.01, latency_s=0.0, lanes=1, overlap=False)

    def time(self, rate: float) -> float:
        sizes = [PROJECTIONS * SLICE] * LAYERS
        return simulate_rate(sizes, [TOP_K] * LAYERS, rate, self.machine).token_s

    def test_without_misses_a_token_computes(self) -> None:
        assert self.time(1.0) == pytest.approx(LAYERS * 0.01)

    def test_with_no_hits_it_also_reads_everything(self) -> None:
        read_s = LAYERS * TOP_K * PROJECTIONS * SLICE / (100 * MIB)
        assert self.time(0.0) == pytest.approx(LAYERS * 0.01 + read_s)

    def test_between_them_it_reads_the_share_that_misses(self) -> None:
        whole, nothing = self.time(0.0), self.time(1.0)
        assert self.time(0.5) == pytest.approx((whole + nothing) / 2, rel=1e-3)
        assert self.time(0.97) == pytest.approx(nothing + 0.03 * (whole - nothing), rel=0.02)


def test_curves_rise_and_end_with_everything() -> None:
    for curve in routing_curves():
        rates = [curve.hit_rate(share / 100) for share in range(101)]
        assert rates == sorted(rates) and rates[0] == 0 and rates[-1] == 1, curve
        assert curve.hit_rate(0.99 * curve.top_k / curve.experts) == 0
        assert curve.source


def test_the_nearest_curve_uses_as_large_a_share_of_its_experts() -> None:
    assert nearest_curve(layout()).experts == 32  # 2 of 16: 4 of 32, not 6 of 128


class TestMemory:
    def divided(self, free_mib: int, context_length: int = 1 << 15, **settings: Any) -> Memory:
        return divide(
            layout(context_length),
            Settings(**settings),
            free=free_mib * MIB,
            dense=8 * MIB,
            buffers={"KV": 16 * MIB, "compute": 5 * MIB, "output": MIB, "model": 999 * MIB},
            context=1024,
            rows=512,
            process=100 * MIB,
        )

    def test_what_is_left_is_for_experts(self) -> None:
        beside = 8 + 16 + HEADROOM // MIB + 48  # dense, KV, headroom, a prompt's layer
        free = 424
        ahead = (free - 8 - 16 - 48) // 8  # MiB that a prompt may read ahead: 44
        found = self.divided(free)
        assert found.cache == (free - beside - ahead) * MIB and found.fits
        assert found.prompt == (48 + ahead) * MIB
        assert found.share == (free - beside - ahead) / 192
        assert self.divided(10_000).cache == 192 * MIB  # all of them
        assert self.divided(380).cache == 0  # 13.5 MiB, and a token routes to 24
        assert self.divided(free, cache_mb=30).cache == 30 * MIB
        assert self.divided(beside + 1).fits and not self.divided(beside).fits

    def test_a_longer_context_costs_the_cache(self) -> None:
        room = 10_000 - 8 - HEADROOM // MIB - 2 * 48 - 24  # all but the experts of one token
        assert self.divided(10_000, context_length=1 << 30).context_room == room * 64
        assert self.divided(10_000).context_room == 1 << 15  # what it was trained for


def test_the_disk_is_read_as_slowly_as_it_is_throttled(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    slices = slices_in(path, 100_000)
    assert slices[1] == (0, 100_000, 200_000) and slices[-1][2] == 41 * 100_000
    shards = [Shard(path, 4 << 20)]
    found = probe_disk(shards, slices, lanes=2, throttle=Throttle(8 * MIB, 0.001))
    assert 0 < found.bandwidth < 8.5 * MIB
    assert found.latency_s >= 0 and found.slice_bytes == 100_000


def test_the_scratch_file_has_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_SCRATCH", 16 << 20)
    path = scratch_file(tmp_path)
    found = path.stat()
    assert found.st_blocks * 512 >= found.st_size == 16 << 20
