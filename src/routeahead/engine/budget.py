"""How large a model's expert cache may be, as memory comes and goes.

Other programs need memory, too: the kernel would kill one of them, or swap. So a thread watches how
much is free, and the cache gives way and grows again.

The hand-over between threads: the watcher publishes `_published`, one number, computed from what is
free and from how much memory the models hold for experts at that moment (a few numbers each, which
their evaluation threads write). The evaluation thread takes it at the beginning of a batch and
resizes the cache. If no batch has begun or ended since the watcher looked before, the model may
rest for long: then the watcher borrows the cache (`engine.ownership`) and makes it smaller itself.
All else here, `_published` excepted, is changed by who has the cache.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable

from routeahead.engine.ownership import Ownership
from routeahead.errors import SettingsError, no_thread
from routeahead.experts.cache import ExpertCache
from routeahead.experts.layout import MIB
from routeahead.machine.memory import available_bytes, pressure

HEADROOM = 256 * MIB
"""Bytes left free: llama.cpp's compute buffers, Python, the kernel; what others take between two
looks."""

FIXED_HEADROOM = 64 * MIB
"""The same if the user chose the cache's size."""

_LOOK_S = 0.25
_PRESSURE = 10.0  # percent; more means that somebody waits for memory
# A cache that is resized loses experts, so it follows in steps of this share of what it wants.
_STEP = 16


class CacheBudget:
    """Budget of one model's expert cache, in bytes.

    Attributes:
        now: what the cache was told last.
        least: the smallest that it has been.
        resizes: how often it has changed.
    """

    def __init__(
        self,
        cache: ExpertCache,
        size: int | None,
        *,
        whole: int,
        token: int,
        floor: int,
        beside: int,
        held: Callable[[], int],
        short: Callable[[], None],
        resize: Callable[[int], None],
        ownership: Ownership,
    ) -> None:
        """
        Measures what is free.

        Args:
            cache: whose budget this is; it is not changed here.
            size: what the user chose; None for all that is free.
            whole: bytes of all experts.
            token: of what one token routes to.
            floor: the cache is never made smaller than this.
            beside: of what stands beside the cache now and then.
            held: returns bytes of the memory that cache and `beside` have taken; on any thread.
            short: called on the watcher's thread if there is less room than the cache was told.
            resize: gives the cache another size; called by who has the cache.
            ownership: of the cache.

        Raises:
            SettingsError: not even one token's experts have room.
        """
        self._cache, self._beside, self._held, self._short = cache, beside, held, short
        self._resize, self._ownership = resize, ownership
        self._moves = -1  # of the ownership, when the watcher looked last
        self._headroom = HEADROOM if size is None else FIXED_HEADROOM
        self._wanted = whole if size is None else min(size, whole)
        self._floor = min(floor, self._wanted)
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()
        room = min(self._share(), available_bytes() - self._headroom - beside)
        if size is None and room < token:
            others = sum(one._held() for one in _all)
            hint = f"; other models of this process hold {others // MIB} MiB" if others else ""
            raise SettingsError(
                f"{max(0, room) // MIB} MiB are left for the expert cache and one token routes "
                f"to {-(-token // MIB)} MiB: use a smaller context, or cache_mb=0{hint}"
            )
        if size and room < self._wanted:
            warnings.warn(
                f"cache_mb={size // MIB}, but {max(0, room) // MIB} MiB are free: the cache stays "
                "within that, and grows when there is more",
                stacklevel=6,
            )
        self.now = self.least = self._published = self._clamp(room)
        self.resizes = 0
        _all.add(self)

    def watch(self) -> None:
        """Starts the watcher, unless there is nothing to decide.

        Raises:
            SettingsError: the system refuses to start a thread.
        """
        if self._floor == self._wanted:
            return
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        try:
            self._watcher.start()
        except RuntimeError:
            self._watcher = None
            raise no_thread("watching memory") from None

    def adjust(self) -> None:
        """Gives the cache the size that memory has room for."""
        size = self.take()
        if size is not None:
            self._resize(size)

    def take(self) -> int | None:
        """The new size of the cache; None if it stays."""
        published, step = self._published, self._wanted // _STEP
        if published < self.now:
            size = self._clamp(published - step)
        elif published == self._wanted or published > self.now + 2 * step:
            size = published
        else:
            return None
        if size == self.now:
            return None
        self.now, self.least = size, min(size, self.least)
        self.resizes += 1
        return size

    def close(self) -> None:
        _all.discard(self)
        self._ended.set()
        if self._watcher and self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(OSError):  # no descriptor to look with: at the next look
                self.look()

    def look(self) -> None:
        """Publishes how much there is room for, and makes the cache of a resting model smaller."""
        room = self._share()
        if pressure() > _PRESSURE:
            room = min(room, self._cache.used - self._wanted // _STEP)
        self._published = self._clamp(room)
        moves, self._moves = self._moves, self._ownership.moves
        if self._published < self.now:
            self._short()
            if moves == self._moves:
                with contextlib.suppress(SettingsError):  # no new lane: the next batch says it
                    self._ownership.borrow(self.adjust)

    def _share(self) -> int:
        """This model's part of what caches may hold: what is free, and what they hold already.

        Models that want less than an equal part leave the rest to the others.
        """
        models = [self, *(one for one in list(_all) if one is not self)]
        room = available_bytes() - self._headroom
        room += sum(one._held() - one._beside for one in models)
        equal = room // len(models)
        return room - sum(min(one._wanted, equal) for one in models[1:])

    def _clamp(self, size: int) -> int:
        return max(self._floor, min(size, self._wanted))


_all: weakref.WeakSet[CacheBudget] = weakref.WeakSet()
