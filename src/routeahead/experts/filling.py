"""Filling: what idle lanes read while the cache has room.

At the start, and again when the cache was laid out anew or resized, the evaluation thread plans: as
many absent experts as there is room for, likeliest first, get a slot each, and their reads are
queued as "idle", which lanes serve when nothing else is to be done. Nothing is evicted for them. At
the beginning of a batch, what has arrived becomes the cache's.

The hand-over between threads: thousands of reads may be queued, and a layer may ask for any of
them, so they are not searched for. Each read is *claimed*, once and atomically (`Read.claim`): by
the lane that takes it from the queue, or by the evaluation thread, because the expert's layer asks
for it or because there is no room for it any more. Whoever has claimed a read owns it; a lane
passes over one that was claimed before it. All else here belongs to the evaluation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from routeahead.experts.cache import ExpertCache
from routeahead.experts.eviction import Key
from routeahead.experts.guesses import Guess
from routeahead.experts.lanes import Lanes
from routeahead.experts.load import Prefetch
from routeahead.experts.reads import Kind, Read
from routeahead.experts.uses import Uses

MakeReads = Callable[[int, int, Kind], list[Read]]
"""(layer, expert, kind) → reads into a slot of its own, each with a ticket of its own."""
Give = Callable[[Sequence[Key]], None]
"""Frees the slots of experts that no lane is reading."""


class Filling:
    """Plans, and what became of them.

    Attributes:
        counts: experts planned; of those, how many arrived before their layer asked (or were on
            their way), and how many were used.
    """

    def __init__(
        self,
        cache: ExpertCache,
        lanes: Lanes,
        uses: Uses,
        *,
        make_reads: MakeReads,
        give: Give,
    ) -> None:
        self._cache, self._lanes, self._uses = cache, lanes, uses
        self._make_reads, self._give = make_reads, give
        self.counts = Prefetch()
        self._planned: dict[int, dict[Key, Guess]] = {}  # by part of the cache, likeliest first
        self._part: dict[int, int] = {}  # layer → its part
        self._leaving: dict[Key, Guess] = {}  # taken back, but a lane had begun
        self._unused: set[Key] = set()  # in the cache, and no layer has asked for them
        self._due = True  # a plan is

    def begin(self) -> None:
        """Before a batch: takes what has arrived into the cache, and plans if that is due."""
        for planned in self._planned.values():
            self._collect(planned)
        for key in [key for key, guess in self._leaving.items() if guess.at_rest]:
            self._take_in(key, self._leaving.pop(key))
        if self._due:
            self._plan()
        self._lanes.resume()

    @property
    def planned(self) -> int:
        """Experts that have a slot and are not in the cache. May be called on any thread."""
        return len(self._leaving) + sum(len(of) for of in list(self._planned.values()))

    def _collect(self, planned: dict[Key, Guess]) -> None:
        """Reads end in the order of the plan, but for as many as there are lanes."""
        arrived: list[Key] = []
        for key, guess in planned.items():
            if not guess.at_rest:
                break
            arrived.append(key)
        for key in arrived:
            self._take_in(key, planned.pop(key))

    def _take_in(self, key: Key, guess: Guess) -> None:
        """What no lane reads any more becomes the cache's, if it has arrived and there is room."""
        if guess.landed and self._cache.fill(*key):
            self._unused.add(key)
            self.counts.completed += 1
        else:
            self._give([key])

    def _plan(self) -> None:
        self._due = False
        parts = self._cache.parts
        self._part = {layer: part for part, layers in enumerate(parts) for layer in layers}
        self._planned = {part: {} for part in range(len(parts))}
        room = {part: self._cache.room(layers[0]) for part, layers in enumerate(parts)}
        reads: list[Read] = []
        for key in self._uses.likeliest():
            part = self._part[key[0]]
            if room[part] and key not in self._cache and key not in self._leaving:
                room[part] -= 1
                guess = self._planned[part][key] = Guess(
                    self._make_reads(*key, "idle"), self.counts
                )
                reads += guess.reads
                self.counts.issued += 1
            if not any(room.values()):
                break
        self._lanes.submit(reads, "idle")

    def asked(self, layer: int, experts: Sequence[int], misses: Iterable[int]) -> dict[int, Guess]:
        """A layer asks for `experts`, of which `misses` are not in the cache.

        Returns those that a lane has begun: the layer owns them now, with their unread rest as
        `Guess.revoked`. The others are forgotten; their slots are the layer's.
        """
        self._uses.add(layer, experts)
        if self._unused:
            used = self._unused.intersection((layer, expert) for expert in experts)
            self._unused -= used
            self.counts.useful += len(used)
        planned = self._planned.get(self._part.get(layer, -1), {})
        begun: dict[int, Guess] = {}
        if not planned and not self._leaving:
            return begun
        for expert in misses:
            guess = planned.pop((layer, expert), None) or self._leaving.pop((layer, expert), None)
            if guess and self._claim(guess):
                begun[expert] = guess
                self.counts.completed += 1
                self.counts.useful += 1
        self._drop_least_likely(layer, planned)
        return begun

    def _claim(self, guess: Guess) -> bool:
        """Takes back what no lane has begun of a guess; returns whether one has begun any."""
        guess.revoked += [read for read in guess.reads if read.claim()]
        return guess.begun

    def _drop_least_likely(self, layer: int, planned: dict[Key, Guess]) -> None:
        """What layers asked for took the room of what was to be read last."""
        while planned and self._cache.room(layer) < len(planned):
            self._drop(*planned.popitem())

    def _drop(self, key: Key, guess: Guess) -> None:
        if self._claim(guess):
            self._leaving[key] = guess
        else:
            self._give([key])

    def release(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Gives up those of the absent `experts` of a layer that no lane has begun, because they
        are about to be read; returns them and those that were not planned."""
        planned = self._planned.get(self._part.get(layer, -1), {})
        free: list[int] = []
        for expert in experts:
            key = (layer, expert)
            guess = planned.pop(key, None)
            if guess and self._claim(guess):
                self._leaving[key] = guess
            if key not in self._leaving:
                free.append(expert)
        return free

    def evicted(self, victims: Sequence[Key]) -> None:
        if self._unused:
            self._unused.difference_update(victims)

    def stop(self) -> None:
        """The cache is about to be resized: nothing more is read until the next plan."""
        for planned in self._planned.values():
            self._collect(planned)
            while planned:
                self._drop(*planned.popitem())
        self._due = True

    def clear(self) -> None:
        """After a fault, with no read in flight: forgets everything."""
        self._planned.clear()
        self._leaving.clear()
        self._unused.clear()
        self._due = True
