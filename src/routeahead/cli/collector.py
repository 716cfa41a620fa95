"""Python's garbage collector, which takes a third of a short run and finds nothing."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is collected meanwhile."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def no_collection_at_exit() -> None:
    """The interpreter's last collection, which would visit all that was imported, finds nothing.

    What has to be closed is closed before: by its owner, or by `weakref.finalize`.
    """
    atexit.register(gc.freeze)
