"""All settings of the engine.

A setting is declared once, as a field that carries its help, range and exclusions (`setting.py`).
Those of a policy stand beside the policy; the bases of `Settings` are the registry of the built-in
policies.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from routeahead.errors import SettingsError
from routeahead.policies.drop import DropSettings
from routeahead.policies.forced import ForcedSettings
from routeahead.policies.prefetch import PredictedSettings, TemporalSettings
from routeahead.policies.probe import ProbeSettings
from routeahead.policies.route_ahead import RouteAheadSettings
from routeahead.policies.settings import PolicySettings
from routeahead.policies.substitute import SubstituteSettings
from routeahead.routing.policy import Model, Policy
from routeahead.setting import (
    EXPERIMENTS,
    POLICIES,
    STREAMING,
    asking,
    check_together,
    check_values,
    facts_of,
    paths_of,
    setting,
)
from routeahead.types import CachePolicy

DenseMode = Literal["anon", "mmap"]
GpuLayers = int | Literal["auto", "all"]
Rows = int | Literal["auto"]
# Settings that a resident model has too.
OF_RESIDENT_TOO = ("n_expert_used", "n_gpu_layers", "ubatch", "lookup")


@dataclass(frozen=True)
class Settings(
    # The built-in policies, in the order of their hooks.
    DropSettings,
    ProbeSettings,
    RouteAheadSettings,
    PredictedSettings,
    ForcedSettings,
    SubstituteSettings,
    TemporalSettings,
):
    """How a model is streamed."""

    resident: bool = setting(
        False, "Load everything and stream nothing: the reference to compare with.", STREAMING
    )
    force_cache: bool = setting(
        False, "Allow a cache smaller than what one token routes to.", STREAMING
    )
    cache_floor_mb: int | None = setting(
        None,
        "Size in MiB below which the cache does not shrink when other programs need memory.",
        STREAMING,
        low=0,
        metavar="MIB",
        unset="what one token routes to",
    )
    # On a recorded routing decay reads 13 to 25 % less than lru, for as much bookkeeping.
    cache_policy: CachePolicy = setting(
        "decay",
        "Which experts leave a full cache: 'decay' (those that recent routings make least likely) "
        "or 'lru' (the least recently used).",
        STREAMING,
    )
    fill_cache: bool | None = setting(
        None,
        "While the cache has room, read the experts that the last runs used most when lanes are "
        "idle.",
        STREAMING,
        unset="in chat and serve, unless the output would depend on it",
        sways_cache=True,
    )
    # Two lanes keep the disk's queue filled while one of them is between reads; with few cores
    # every further lane takes time from the matrix products (docs/architecture.md, "Lanes").
    io_threads: int = setting(2, "Lanes: threads that read experts.", STREAMING, low=1, high=64)
    ubatch: Rows = setting(
        "auto",
        "Rows of a prompt that are evaluated at once, and read experts once. 'auto' takes as many "
        "as context and memory allow, up to 4096.",
        STREAMING,
        low=1,
        metavar="N",
    )
    overlap: bool = setting(True, "Read later projections while earlier ones compute.", STREAMING)
    dense: DenseMode = setting(
        "anon",
        "Dense weights: 'anon' (read once, never dropped) or 'mmap' (mapped lazily).",
        STREAMING,
    )
    direct_io: bool = setting(
        True,
        "Read experts past the page cache (O_DIRECT); buffered if that is refused.",
        STREAMING,
    )
    verify_reads: bool = setting(
        False,
        "Compare what is read with the checksums that `routeahead checksum` wrote.",
        STREAMING,
    )
    n_expert_used: int | None = setting(
        None,
        "Experts a token routes to in each layer, instead of the model's (lossy).",
        STREAMING,
        low=1,
        unset="the model's",
    )
    n_gpu_layers: GpuLayers = setting(
        0,
        "Layers whose dense weights go to a device (docs/gpu.md): a number, 'auto' for what fits "
        "there, or 'all'; experts stay in memory.",
        STREAMING,
        low=-1,
        flags=("-ngl", "--gpu-layers", "--n-gpu-layers"),
        metavar="N|auto|all",
    )
    lookup: int = setting(
        0,
        "Guess up to N tokens from what the text has said before, and verify them in one batch; "
        "0 is off.",
        STREAMING,
        low=0,
        high=256,
        metavar="N",
    )
    policy: tuple[str, ...] = setting(
        (),
        "A policy of your own (docs/policy-api.md); may be given several times.",
        POLICIES,
        metavar="MODULE:CLASS",
    )
    throttle: float = setting(
        0.0,
        "Read at most this many MiB/s in all, as a slower disk; 0 is unthrottled.",
        EXPERIMENTS,
        low=0,
    )
    throttle_latency_ms: float = setting(
        0.0, "With throttle: delay of each read.", EXPERIMENTS, low=0, needs=("throttle",)
    )

    @classmethod
    def split(
        cls, arguments: dict[str, Any], others: Iterable[str] = ()
    ) -> tuple[Settings, dict[str, Any]]:
        """Separates keyword arguments into validated settings and what is left.

        A file may be given as text.

        Args:
            others: names that may be left; any if there are none.

        Raises:
            TypeError: a keyword is neither.
            SettingsError: see `validate`.
        """
        names, known = {f.name for f in fields(cls)}, set(others)
        ours = {k: v for k, v in arguments.items() if k in names}
        for name in paths_of(cls).intersection(ours):
            if isinstance(ours[name], (str, os.PathLike)):
                ours[name] = Path(ours[name])
        rest = {k: v for k, v in arguments.items() if k not in names}
        if known and (strange := sorted(set(rest) - known)):
            near = difflib.get_close_matches(strange[0], names | known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"unknown keyword argument {strange[0]!r}{hint}")
        return cls(**ours).validate(), rest

    def validate(self) -> Settings:
        """Returns self.

        Raises:
            SettingsError: a value is out of range or two settings contradict each other.
        """
        check_values(self)
        check_together(self)
        for owner in registry():
            owner.check(self)
        if self.resident:
            self._refuse_streaming_settings()
        if self.force_cache and self.cache_mb in ("auto", 0):
            raise SettingsError(
                "force_cache allows a cache that is too small: give its size with cache_mb"
            )
        if self.cache_mb != "auto" and (self.cache_floor_mb or 0) > self.cache_mb:
            raise SettingsError(
                f"cache_floor_mb={self.cache_floor_mb} is more than cache_mb={self.cache_mb}"
            )
        return self

    @property
    def fills_while_waiting(self) -> bool:
        """Whether lanes fill the cache while a person reads or types: as was chosen, else if there
        is one and no output depends on what is in it. A policy of the user's own might ask."""
        if self.fill_cache is not None:
            return self.fill_cache
        return not (self.resident or self.cache_mb == 0 or self.policy or asking(self))

    def policies(self, model: Model) -> Iterator[Policy]:
        """The built-in policies that are on.

        Raises:
            SettingsError: a setting does not fit the model.
        """
        for owner in registry():
            policy = owner.make(self, model)
            if policy:
                yield policy

    def _refuse_streaming_settings(self) -> None:
        plain = Settings(resident=True)
        for name, value in asdict(self).items():
            if name not in OF_RESIDENT_TOO and value != getattr(plain, name):
                raise SettingsError(
                    f"resident streams nothing, so {name}={value!r} means nothing: drop one of them"
                )

    def as_dict(self) -> dict[str, Any]:
        """As JSON would have it."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}


Settings.__doc__ = "\n".join(
    [
        "How a model is streamed.",
        "",
        "Attributes:",
        *(f"    {name}: {facts.help}" for name, facts in facts_of(Settings).items()),
    ]
)


def registry() -> tuple[type[PolicySettings], ...]:
    """The settings of each built-in policy, in the order of the policies' hooks."""
    return tuple(base for base in Settings.__bases__ if issubclass(base, PolicySettings))
