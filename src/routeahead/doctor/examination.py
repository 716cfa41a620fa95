"""Examines a model on this machine: what it is made of, the probes, and what follows from them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from routeahead.config import Settings
from routeahead.doctor.device import OnDevice, expected, offload_here, on_device
from routeahead.doctor.disk_probe import (
    Disk,
    Throttle,
    probe_disk,
    scratch_file,
    slice_bytes,
    slices_in,
    slices_of,
)
from routeahead.doctor.engine_probe import TOKENS, Engine, EngineProbe, Streamed
from routeahead.doctor.forecast import Forecast, Traffic, forecast, tokens_like, traffic
from routeahead.doctor.memory import Memory, divide
from routeahead.engine.ubatch import DEFAULT
from routeahead.errors import ModelError, SettingsError
from routeahead.experts.layout import MIB, ModelLayout, Shard
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.memory import available_bytes

Say = Callable[[str], None]

_LONGEST_S = 2.0  # of a token that is tried

MODELLED = (
    "cache_mb", "cache_floor_mb", "force_cache", "io_threads", "overlap", "dense", "direct_io",
    "throttle", "throttle_latency_ms", "replay_routing", "n_expert_used", "cache_policy", "ubatch",
    "n_gpu_layers",
)  # fmt: skip
"""Settings that a forecast knows of."""


@dataclass(frozen=True)
class Examination:
    """What was found.

    `device` is None if nothing goes to one. The last four are None if the model does not run here,
    and if layers would go to a device that is not here: nothing can be measured then. `streamed` is
    None also if the model's bytes are not here or a token takes too long to try.
    """

    layout: ModelLayout
    memory: Memory
    device: OnDevice | None
    disk: Disk
    engine: Engine | None
    streamed: Streamed | None
    traffic: Traffic | None
    forecast: Forecast | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it. Bytes, seconds, tokens a second."""
        routed = self.traffic
        return {
            "arch": self.layout.arch,
            "runs": self.memory.fits,
            "memory": asdict(self.memory)
            | {"total": self.memory.total, "share_of_experts": self.memory.share},
            "device": self._device(),
            "disk": asdict(self.disk),
            "engine": self._engine(),
            "streamed": asdict(self.streamed) if self.streamed else None,
            "traffic": {"text": routed.text, "hit_rate": routed.hit_rate} if routed else None,
            "forecast": asdict(self.forecast) if self.forecast else None,
        }

    def _engine(self) -> dict[str, Any] | None:
        one = self.engine
        return asdict(one) | {"buffers": one.buffers._asdict()} if one else None

    def _device(self) -> dict[str, Any] | None:
        there = self.device
        if not there:
            return None
        parts = {"kv": there.kv, "compute": there.compute, "total": there.total}
        return there.offload.as_dict(self.layout, there.devices) | parts


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
    room = min(context, int(layout.value("context_length") or context))
    offload, found = offload_here(layout, settings.n_gpu_layers, room)
    settings = replace(settings, n_gpu_layers=offload.layers)
    free, process = available_bytes(), psutil.Process().memory_info().rss
    say("reading slices of experts from the disk")
    disk = _probe_disk(layout, settings, here)
    sizes = {"free": free, "dense": offload.host_bytes(layout), "process": process}
    buffers = expected(layout, offload, room)
    there = on_device(layout, offload, found, buffers) if offload.layers else None
    absent = there is not None and not found
    known = buffers.host if absent else {}
    memory = divide(layout, settings, buffers=known, context=room, rows=DEFAULT, **sizes)
    if absent or not memory.fits:
        return Examination(layout, memory, there, disk, None, None, None, None)
    say("loading the dense weights, and computing some tokens")
    with EngineProbe(model, settings, threads=threads, context=context) as probe:
        engine = probe.without_misses()
        memory = divide(
            layout, settings, buffers=engine.buffers.host, context=engine.context,
            rows=engine.rows, **(sizes | {"dense": engine.dense_bytes}),
        )  # fmt: skip
        routed = traffic(layout, settings, memory, warmup=warmup, tokens=tokens)
        read_s = (1 - routed.hit_rate) * memory.least / disk.bandwidth
        streamed = None
        if here and read_s < _LONGEST_S:
            say("decoding tokens that miss as many experts as a run's will")
            like = tokens_like(routed, layout, settings, TOKENS)
            streamed = probe.streamed(like, cache=memory.cache, full=routed.full)
    if there:
        there = on_device(layout, offload, found, engine.buffers)
    if streamed:
        disk = disk.and_later(_probe_disk(layout, settings, here))
    told = forecast(
        layout, settings, memory, disk, engine, streamed, routed, start_s=start_s, here=here
    )
    return Examination(layout, memory, there, disk, engine, streamed, routed, told)


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
        slices = slices_in(path, slice_bytes(layout))
        shards = [Shard(path, path.stat().st_size)]
        return probe_disk(shards, slices, lanes=lanes, throttle=throttle, direct=direct)
