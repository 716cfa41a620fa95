"""Every setting of the engine, and the one place that knows which of them go together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from routeahead.errors import SettingsError

CacheSize = int | Literal["auto"]
DenseMode = Literal["anon", "mmap"]

# Two lanes keep the disk's queue filled while one of them is between reads; on a machine with few
# cores every further lane takes time from the matrix products (docs/architecture.md, "Lanes").
DEFAULT_IO_THREADS = 2


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
    """

    resident: bool = False
    cache_mb: CacheSize = "auto"
    force_cache: bool = False
    io_threads: int = DEFAULT_IO_THREADS
    overlap: bool = True
    dense: DenseMode = "anon"
    direct_io: bool = True

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
        if self.resident:
            self._refuse_streaming_settings()
        if self.force_cache and self.cache_mb in ("auto", 0):
            raise SettingsError(
                "force_cache allows a cache that is too small: give its size with cache_mb"
            )
        return self

    def _refuse_streaming_settings(self) -> None:
        plain = Settings(resident=True)
        for name, value in asdict(self).items():
            if value != getattr(plain, name):
                raise SettingsError(
                    f"resident streams nothing, so {name}={value!r} means nothing: drop one of them"
                )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
