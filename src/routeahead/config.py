"""Every setting of the engine, and the one place that knows which of them go together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from routeahead.errors import SettingsError

CacheSize = int | Literal["auto"]
DenseMode = Literal["anon", "mmap"]

# Two lanes keep the disk's queue filled while one of them is between reads; on a machine with few
# cores every further lane takes time from the matrix products (docs/architecture.md, "Lanes").
DEFAULT_IO_THREADS = 2


_EXCLUSIVE = (
    ("route_ahead", "predict_log", "what it scores is the router's choice, which is replaced"),
    ("route_ahead", "prefetch", "a committed routing is known and read ahead, not guessed"),
    ("route_ahead", "predict_prefetch", "a committed routing is known and read ahead, not guessed"),
    ("route_ahead", "expert_substitute", "a committed routing cannot be chosen again"),
    ("prefetch", "predict_prefetch", "one guess a layer can be read, not two"),
    ("predict_prefetch", "predict_log", "both want the gates' inputs: probe first, then prefetch"),
    ("expert_substitute", "replay_routing", "a forced routing cannot be chosen again"),
    ("predict_prefetch", "replay_routing", "this model's gates know nothing of a forced routing"),
    ("predict_log", "replay_routing", "this model's gates know nothing of a forced routing"),
)
_PREDICTING = ("route_ahead", "predict_prefetch")
_DEPENDENT: dict[str, tuple[str, ...]] = {  # of no effect unless one of these is on
    "drop_renorm": ("drop_cold_experts",),
    "drop_in_prefill": ("drop_cold_experts",),
    "predict_spec_max": ("predict_prefetch",),
    "route_ahead_late": ("route_ahead",),
    "route_ahead_compute": _PREDICTING,
    "gate_precision": _PREDICTING,
    "drop_aware": _PREDICTING,
}


@dataclass(frozen=True)
class Settings:
    """How a model is streamed.

    Attributes:
        resident: load the whole model into memory and stream nothing (the reference run).
        cache_mb: expert cache in MiB, "auto" (sized from free memory at load) or 0 (keep nothing).
        force_cache: allow a cache smaller than what one token routes to.
        io_threads: number of lanes, threads that read experts.
        overlap: let reads of later projections run while earlier ones compute.
        dense: "anon" reads the dense weights once into private memory; "mmap" maps them lazily.
        direct_io: read experts with O_DIRECT (falls back to buffered reads where that is refused).
        n_expert_used: experts a token routes to in each layer, instead of the model's (lossy).
        replay_routing: a recorded routing trace that replaces the routers' choices (lossy).
        route_ahead: decode layers use the experts predicted this many MoE layers earlier (lossy);
            0 is off.
        route_ahead_compute: predictions are computed "inline", in the graph's callback, or on a
            "worker" thread.
        route_ahead_late: a layer whose prediction is not ready keeps its router's choice ("pass")
            or waits for it ("wait", which makes the output independent of timing, if nothing is
            dropped).
        gate_precision: of the router matrices that predict: "f32" uses the model's own weights,
            "f16" and "int8" smaller copies.
        drop_cold_experts: F in 0..1; decode does not read a missing expert whose share of its
            routing is below F / top-k, and goes on without it (lossy, depends on the cache's
            state); 0 is off.
        drop_renorm: the weights of the experts that are left are scaled to the routing's mass.
        drop_in_prefill: prompts lose experts too.
        drop_aware: what a prediction says will be dropped is not read early.
        expert_substitute: resident experts get their selection score raised by this share of the
            token's score range (lossy, depends on the cache's state); 0 is off.
        prefetch: MoE layers for which the previous token's experts are read ahead; 0 is off.
        predict_prefetch: read ahead what the next layer's router says of this layer's input.
        predict_spec_max: with predict_prefetch, missing experts to read a layer at most.
        predict_log: score how well routings could have been predicted.
        throttle: MiB/s that all lanes get together, to stand for a slower disk; 0 is unthrottled.
        throttle_latency_ms: delay of each read, with `throttle`.
    """

    resident: bool = False
    cache_mb: CacheSize = "auto"
    force_cache: bool = False
    io_threads: int = DEFAULT_IO_THREADS
    overlap: bool = True
    dense: DenseMode = "anon"
    direct_io: bool = True
    n_expert_used: int | None = None
    replay_routing: Path | None = None
    route_ahead: int = 0
    route_ahead_compute: Literal["inline", "worker"] = "inline"
    route_ahead_late: Literal["pass", "wait"] = "wait"
    gate_precision: Literal["f32", "f16", "int8"] = "f32"
    drop_cold_experts: float = 0.0
    drop_renorm: bool = False
    drop_in_prefill: bool = False
    drop_aware: bool = True
    expert_substitute: float = 0.0
    prefetch: int = 0
    predict_prefetch: bool = False
    predict_spec_max: int = 2
    predict_log: bool = False
    throttle: float = 0.0
    throttle_latency_ms: float = 0.0

    @classmethod
    def split(cls, arguments: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
        """Separates keyword arguments into validated settings and what is left."""
        names = {f.name for f in fields(cls)}
        ours = {k: v for k, v in arguments.items() if k in names}
        rest = {k: v for k, v in arguments.items() if k not in names}
        return cls(**ours).validate(), rest

    def validate(self) -> Settings:
        """Returns self.

        Raises:
            SettingsError: a value is out of range or two settings contradict each other.
        """
        if self.cache_mb != "auto" and (not isinstance(self.cache_mb, int) or self.cache_mb < 0):
            raise SettingsError(f"cache_mb is {self.cache_mb!r}: give a size in MiB, 0, or 'auto'")
        if not 1 <= self.io_threads <= 64:
            raise SettingsError(f"io_threads is {self.io_threads}: give 1 to 64")
        if self.dense not in ("anon", "mmap"):
            raise SettingsError(f"dense is {self.dense!r}: give 'anon' or 'mmap'")
        if self.n_expert_used is not None and self.n_expert_used < 1:
            raise SettingsError(f"n_expert_used is {self.n_expert_used}: give at least 1")
        if not (self.throttle >= 0 and self.throttle_latency_ms >= 0):
            raise SettingsError("throttle and throttle_latency_ms cannot be negative")
        if self.throttle_latency_ms and not self.throttle:
            raise SettingsError("throttle_latency_ms needs throttle (MiB/s) beside it")
        self._check_route_ahead()
        self._check_neighbours()
        for one, other, why in _EXCLUSIVE:
            if getattr(self, one) and getattr(self, other):
                raise SettingsError(f"{one} and {other} exclude each other: {why}")
        for name, needed in _DEPENDENT.items():
            changed = getattr(self, name) != getattr(type(self), name)
            if changed and not any(getattr(self, other) for other in needed):
                raise SettingsError(f"{name} has no effect without {' or '.join(needed)}")
        if self.resident:
            self._refuse_streaming_settings()
        if self.force_cache and self.cache_mb in ("auto", 0):
            raise SettingsError(
                "force_cache allows a cache that is too small: give its size with cache_mb"
            )
        return self

    def _check_route_ahead(self) -> None:
        if self.route_ahead < 0:
            raise SettingsError(f"route_ahead is {self.route_ahead}: give a number of layers, or 0")
        choices = {
            "route_ahead_compute": ("inline", "worker"),
            "route_ahead_late": ("pass", "wait"),
            "gate_precision": ("f32", "f16", "int8"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise SettingsError(
                    f"{name} is {getattr(self, name)!r}: give {' or '.join(map(repr, allowed))}"
                )

    def _check_neighbours(self) -> None:
        if not 0 <= self.drop_cold_experts <= 1:
            raise SettingsError(f"drop_cold_experts is {self.drop_cold_experts}: give 0 to 1")
        if not 0 <= self.expert_substitute <= 1:
            raise SettingsError(f"expert_substitute is {self.expert_substitute}: give 0 to 1")
        for name in ("prefetch", "predict_spec_max"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name)}: it cannot be negative")
        if self.predict_prefetch and not self.predict_spec_max and self.cache_mb == 0:
            raise SettingsError(
                "predict_spec_max=0 only protects what the cache has, and cache_mb=0 keeps nothing"
            )
        for name in ("drop_cold_experts", "expert_substitute"):
            if getattr(self, name) and self.cache_mb == 0:
                raise SettingsError(
                    f"{name} asks what is in the cache, and cache_mb=0 keeps nothing: give a size"
                )

    def _refuse_streaming_settings(self) -> None:
        plain = Settings(resident=True)
        for name, value in asdict(self).items():
            if name != "n_expert_used" and value != getattr(plain, name):
                raise SettingsError(
                    f"resident streams nothing, so {name}={value!r} means nothing: drop one of them"
                )

    def as_dict(self) -> dict[str, Any]:
        """As JSON would have it."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
