"""What is on its way into memory for a layer, and what became of reads that began early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from routeahead.experts.reads import Read, Ticket

_REMAINING, _ERROR = attrgetter("remaining"), attrgetter("error")


@dataclass
class Load:
    """A layer's reads in flight: one ticket a projection, which those that one read brings share.

    Attributes:
        experts: what is being read.
        tickets: projection → its reads; a projection that is absent has nothing to wait for, or has
            been waited for.
        adopted: reads of the layer that were begun before it asked.
        reads: those of a load that was begun early.
    """

    layer: int
    experts: Sequence[int]
    tickets: dict[str, Ticket] = field(default_factory=dict)
    adopted: list[Load] = field(default_factory=list)
    reads: tuple[Read, ...] = ()

    def done(self) -> bool:
        left = any(map(_REMAINING, self.tickets.values()))
        return not left and all(map(Load.done, self.adopted))

    def failed(self) -> bool:
        failed = any(map(_ERROR, self.tickets.values()))
        return failed or any(map(Load.failed, self.adopted))

    def wait(self, projection: str | None) -> None:
        """Blocks until the reads of `projection` (None: of all) have settled.

        Raises:
            ReadError: one of them failed.
        """
        for load in self.adopted:
            load.wait(projection)
        for name in list(self.tickets) if projection is None else (projection,):
            ticket = self.tickets.get(name)
            if ticket is not None:
                ticket.wait()
                del self.tickets[name]


@dataclass
class Prefetch:
    """Experts read before their layer asked. Each is all of its projections.

    Attributes:
        issued: queued early, because they were absent.
        completed: read, or being read, when their layer came; the others' reads no lane had begun,
            or they were thrown away by a fault.
        landed: all of their bytes were there then.
        useful: used by it.
    """

    issued: int = 0
    completed: int = 0
    landed: int = 0
    useful: int = 0
