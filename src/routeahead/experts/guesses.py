"""Guesses: experts that a later layer may use, read beside the cache.

A guess evicts nothing. It stands beside the cache until its layer has been there: what that layer
uses is the cache's from then on, as if it had been read on demand, and the rest is thrown away. So
a wrong guess costs bandwidth, and memory for as long, and the cache holds what it would hold
without any.

Owned by the evaluation thread; lanes see only the `Read`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from routeahead.experts.lanes import Read


@dataclass
class Guess:
    """One expert that was guessed.

    Attributes:
        reads: one a projection, each with a ticket of its own.
        revoked: those of them that were taken back from the lanes' queue, unread.
        wanted: its layer has not been there yet.
    """

    reads: Sequence[Read]
    revoked: list[Read] = field(default_factory=list)
    wanted: bool = True

    @property
    def begun(self) -> bool:
        """A lane has, or had, some of it."""
        return len(self.revoked) < len(self.reads)

    @property
    def landed(self) -> bool:
        """All of its bytes are here."""
        return all(read.ticket.done and not read.ticket.error for read in self.reads)

    @property
    def at_rest(self) -> bool:
        """No lane has it, nor will have."""
        return all(read.ticket.done or read in self.revoked for read in self.reads)

    def take_revoked(self) -> list[Read]:
        """What is still to be read."""
        revoked, self.revoked = self.revoked, []
        return revoked


class Guesses:
    """All guesses by (layer, expert)."""

    def __init__(self) -> None:
        self._guesses: dict[tuple[int, int], Guess] = {}

    def __bool__(self) -> bool:
        return bool(self._guesses)

    def get(self, layer: int, expert: int) -> Guess | None:
        return self._guesses.get((layer, expert))

    def add(self, layer: int, expert: int, guess: Guess) -> None:
        self._guesses[layer, expert] = guess

    def pop(self, layer: int, expert: int) -> Guess | None:
        return self._guesses.pop((layer, expert), None)

    def revoke(self, reads: Iterable[Read]) -> None:
        """Files reads that were taken back from the lanes."""
        for read in reads:
            self._guesses[read.slice.tensor.layer, read.slice.expert].revoked.append(read)

    def pass_by(self, layer: int) -> int:
        """The layer has been there: what is left of its guesses is of no use.

        Returns how many of them a lane had begun.
        """
        begun = 0
        for (at, _), guess in self._guesses.items():
            if at == layer and guess.wanted:
                guess.wanted = False
                begun += guess.begun
        return begun

    def sweep(self) -> list[tuple[int, int]]:
        """Forgets what nobody wants and no lane has; returns its (layer, expert) keys."""
        gone = [key for key, guess in self._guesses.items() if not guess.wanted and guess.at_rest]
        for key in gone:
            del self._guesses[key]
        return gone

    def clear(self) -> None:
        self._guesses.clear()
