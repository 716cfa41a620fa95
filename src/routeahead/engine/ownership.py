"""Whose the expert cache is: the batch's that is being evaluated, or nobody's.

The hand-over between threads: the evaluation thread *takes* the cache before a batch and *gives* it
back after it; in between, it alone reads and changes the cache, the slots and the guesses. While
nobody has the cache, another thread may *borrow* it for one piece of work. `take` waits for such a
piece, which is short; `borrow` waits for nobody. The lock orders what a borrower did before what
the next batch does.

A batch that was given to `llama_decode` directly has no end that anybody is told of, so it has the
cache until the next batch ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ownership:
    """Of one model's cache.

    Attributes:
        moves: how often it was taken or given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False  # set under the lock; taken back by the thread that set it
        self.moves = 0

    def take(self) -> None:
        """It is the calling thread's now, if it was not before."""
        with self._lock:
            self._taken = True
            self.moves += 1

    def give(self) -> None:
        """Nobody computes with what is in the cache any more."""
        self.moves += 1
        self._taken = False

    def borrow(self, work: Callable[[], None]) -> bool:
        """Does `work` while nobody else has the cache; whether it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._taken:
                work()
                return True
            return False
        finally:
            self._lock.release()

    def forked(self) -> None:
        """In a child process, after a fork: a thread of the parent may hold the lock."""
        self._lock = threading.Lock()
