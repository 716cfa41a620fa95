"""Guesses: experts that a later layer may use, read beside the cache.

A guess evicts nothing. It is kept beside the cache until its layer has asked for its experts: what
that layer uses becomes the cache's, as if it had been read on demand, and the rest is discarded. So
a wrong guess costs bandwidth, and memory until then, and the cache holds what it would hold without
guesses.

Owned by the evaluation thread; lanes see only the `Read`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from routeahead.experts.load import Prefetch
from routeahead.experts.reads import Read, Ticket


@dataclass
class Guess:
    """One expert that was guessed.

    Attributes:
        reads: that bring its projections, each with a ticket of its own.
        counts: where it is counted.
        ahead: it is for a prompt's layer, which is expected to use nearly all of its experts.
        revoked: those of them that were taken back from the lanes' queue, unread.
        wanted: its layer has not asked for its experts yet.
    """

    reads: Sequence[Read]
    counts: Prefetch
    ahead: bool = False
    revoked: list[Read] = field(default_factory=list)
    wanted: bool = True

    @property
    def begun(self) -> bool:
        """Whether a lane has begun one of its reads."""
        return len(self.revoked) < len(self.reads)

    @property
    def landed(self) -> bool:
        """Whether all of its bytes have arrived."""
        return all(read.ticket.done and not read.ticket.error for read in self.reads)

    @property
    def at_rest(self) -> bool:
        """Whether no lane is reading it or will."""
        return all(read.ticket.done or read in self.revoked for read in self.reads)

    def take_revoked(self) -> list[Read]:
        """Removes and returns the revoked reads: what is still to be read."""
        revoked, self.revoked = self.revoked, []
        return revoked


class Guesses:
    """All guesses by (layer, expert)."""

    def __init__(self) -> None:
        self._guesses: dict[tuple[int, int], Guess] = {}

    def __bool__(self) -> bool:
        return bool(self._guesses)

    def __len__(self) -> int:
        return len(self._guesses)

    def get(self, layer: int, expert: int) -> Guess | None:
        return self._guesses.get((layer, expert))

    def add(self, layer: int, expert: int, guess: Guess) -> None:
        self._guesses[layer, expert] = guess

    def pop(self, layer: int, expert: int) -> Guess | None:
        return self._guesses.pop((layer, expert), None)

    def revoke(self, reads: Iterable[Read]) -> None:
        """Notes reads that were taken back from the lanes."""
        for read in reads:
            self._guesses[read.layer, read.expert].revoked.append(read)

    def pass_by(self, layer: int) -> None:
        """Marks what is left of a layer's guesses as useless, once it has its experts."""
        for (at, _), guess in self._guesses.items():
            if at == layer and guess.wanted:
                guess.wanted = False
                guess.counts.completed += guess.begun
                guess.counts.landed += guess.landed

    def any_ahead(self) -> bool:
        return any(guess.ahead for guess in self._guesses.values())

    def abandon(self, layer: int | None) -> list[Ticket]:
        """Marks all guesses of a layer as useless, or (None) all that were read ahead.

        Returns what to wait for until they are at rest.
        """
        gone = [
            g for (at, _), g in self._guesses.items() if at == layer or (layer is None and g.ahead)
        ]
        for guess in gone:
            guess.counts.completed += guess.wanted and guess.begun
            guess.counts.landed += guess.wanted and guess.landed
            guess.wanted = False
        return [read.ticket for guess in gone for read in guess.reads if read not in guess.revoked]

    def sweep(self) -> list[tuple[int, int]]:
        """Forgets guesses that are useless and at rest; returns their (layer, expert) keys."""
        gone = [key for key, guess in self._guesses.items() if not guess.wanted and guess.at_rest]
        for key in gone:
            del self._guesses[key]
        return gone

    def clear(self) -> None:
        self._guesses.clear()
