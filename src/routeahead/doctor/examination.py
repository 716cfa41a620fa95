"""Examines a model on this machine: what it is made of, the probes, and what follows from them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from routeahead.config import Settings
from routeahead.doctor.disk_probe import (
    Disk,
    Throttle,
    probe_disk,
    scratch_file,
    slices_in,
    slices_of,
)
from routeahead.doctor.engine_probe import Engine, probe_engine
from routeahead.doctor.forecast import Forecast, Traffic, forecast, traffic
from routeahead.doctor.memory import Memory, divide
from routeahead.engine.ubatch import DEFAULT
from routeahead.errors import ModelError, SettingsError
from routeahead.experts.layout import MIB, ModelLayout, Shard
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.memory import available_bytes

Say = Callable[[str], None]

MODELLED = (
    "cache_mb", "cache_floor_mb", "force_cache", "io_threads", "overlap", "dense", "direct_io",
    "throttle", "throttle_latency_ms", "replay_routing", "n_expert_used", "cache_policy", "ubatch",
)  # fmt: skip
"""Settings that a forecast knows of."""


@dataclass(frozen=True)
class Examination:
    """What was found; the last three are None if the model does not run here."""

    layout: ModelLayout
    memory: Memory
    disk: Disk
    engine: Engine | None
    traffic: Traffic | None
    forecast: Forecast | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it. Bytes, seconds, tokens a second."""
        routed = self.traffic
        return {
            "arch": self.layout.arch,
            "runs": self.forecast is not None,
            "memory": asdict(self.memory)
            | {"total": self.memory.total, "share_of_experts": self.memory.share},
            "disk": asdict(self.disk),
            "engine": asdict(self.engine) if self.engine else None,
            "traffic": {"text": routed.text, "hit_rate": routed.hit_rate} if routed else None,
            "forecast": asdict(self.forecast) if self.forecast else None,
        }


def examine(
    model: Path,
    settings: Settings,
    *,
    threads: int | None = None,
    context: int = 4096,
    start_s: float = 0.0,
    here: bool = True,
    warmup: int = 0,
    tokens: int | None = None,
    say: Say = lambda text: None,
) -> Examination:
    """Runs the probes, ten seconds in all, and forecasts.

    Args:
        start_s: what the command takes before it loads a model.
        here: whether the files have the model's bytes, and not holes.
        warmup, tokens: decoded tokens of a recorded routing, as `bench` counts them.
        say: is told what goes on.

    Raises:
        ModelError: the model cannot be used.
        SettingsError: a setting is not modelled, or makes no sense.
    """
    plain = Settings()
    for name, value in vars(settings).items():
        if name not in MODELLED and value != getattr(plain, name):
            raise SettingsError(f"doctor has no model of {name}: leave it out, or measure a run")
    layout = read_layout(model).loaded()
    if not layout.experts:
        raise ModelError(f"{model}: has no experts ({layout.arch}): nothing is streamed")
    free, process = available_bytes(), psutil.Process().memory_info().rss
    say("reading slices of experts from the disk")
    disk = _probe_disk(layout, settings, here)
    sizes = {"free": free, "dense": layout.dense_bytes, "process": process}
    memory = divide(layout, settings, buffers={}, context=context, rows=DEFAULT, **sizes)
    if not memory.fits:
        return Examination(layout, memory, disk, None, None, None)
    say("loading the dense weights, and computing some tokens")
    expected_s = layout.token_bytes(settings.n_expert_used) / disk.bandwidth
    engine = probe_engine(
        model, settings, threads=threads, context=context,
        expected_cold_s=expected_s if here else float("inf"),
    )  # fmt: skip
    memory = divide(
        layout, settings, buffers=engine.buffers, context=engine.context, rows=engine.rows,
        **(sizes | {"dense": engine.dense_bytes}),
    )  # fmt: skip
    routed = traffic(layout, settings, memory, warmup=warmup, tokens=tokens)
    found = forecast(layout, settings, memory, disk, engine, routed, start_s=start_s, here=here)
    return Examination(layout, memory, disk, engine, routed, found)


def _probe_disk(layout: ModelLayout, settings: Settings, here: bool) -> Disk:
    throttle = Throttle(settings.throttle * MIB, settings.throttle_latency_ms / 1e3)
    lanes, direct = settings.io_threads, settings.direct_io
    if here:
        return probe_disk(
            layout.shards, slices_of(layout), lanes=lanes, throttle=throttle, direct=direct
        )
    beside = layout.shards[0].path.parent
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        path = scratch_file(Path(folder))
        slices = slices_in(path, layout.experts[0].expert_bytes)
        shards = [Shard(path, path.stat().st_size)]
        return probe_disk(shards, slices, lanes=lanes, throttle=throttle, direct=direct)
