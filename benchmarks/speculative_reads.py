"""What speculative reads would bring to decoding, simulated on a recorded routing.

    python benchmarks/speculative_reads.py TRACE.csv --json speculative.json

While a layer computes, idle lanes read experts that the next layers are likely to use and that are
not in the cache. A guess has the place of one of the engine's prefetchers: it evicts nothing, a
layer that asks takes back what no lane has begun, and what it did not use is wasted. Who guesses:

* *before*: what the token before used in that layer (`--prefetch`).
* *followers*: what followed the token before's experts in that layer with at least a given
  probability, by the counts of pairs that the cache's eviction keeps, too (`experts.decay`).
* *router*: a router that is asked a layer early (`--predict-prefetch`) and names as many experts as
  the layer uses, a given share of which are right. A recorded routing does not tell how many are.
* *oracle*: what the layer will use; as much as any guess could bring.

The cache is the engine's own; lanes and disk are those of `replay.time_model`: a read begins when a
lane is free, and has the disk's whole bandwidth when those begun before it have ended.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from routeahead.experts.cache import ExpertCache
from routeahead.experts.decay import SUCCESSOR_PRIOR
from routeahead.experts.eviction import eviction
from routeahead.experts.layout import MIB
from routeahead.replay.time_model import PROJECTIONS, Machine
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.route_trace import Batch, RouteTrace, read_trace

CASES = [
    ("nothing", 0.0),
    ("before", 1.0),
    *product(("followers",), (0.1, 0.2, 0.3, 0.5, 0.7)),
    *product(("router",), (0.6, 0.75, 0.9)),
    ("oracle", 1.0),
]  # who guesses, and the least score that is read, or the share that is right


@dataclass(eq=False)
class Read:
    """A slice; `arrives` is None while no lane has begun it."""

    nbytes: float
    arrives: float | None = None


class Lanes:
    """Reads that layers wait for, and guesses, which are begun when there is none of those."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._disk_free_at = machine, 0.0
        self._free_at = [0.0] * machine.lanes  # a heap
        self.demand, self.guessed = deque[Read](), deque[Read]()

    def advance(self, now: float) -> None:
        while (self.demand or self.guessed) and self._free_at[0] < now:
            self._begin()
        self._free_at = [max(at, now) for at in self._free_at]

    def wait(self, reads: list[Read]) -> float:
        """When the last one arrives."""
        while any(read.arrives is None for read in reads):
            self._begin()
        return max((read.arrives or 0.0 for read in reads), default=0.0)

    def _begin(self) -> None:
        read = (self.demand or self.guessed).popleft()
        begun_at = heapq.heappop(self._free_at)
        sent_at = max(begun_at + self._machine.latency_s, self._disk_free_at)
        read.arrives = self._disk_free_at = sent_at + read.nbytes / self._machine.bandwidth
        heapq.heappush(self._free_at, read.arrives)


class Followers:
    """Which experts of a layer followed which, from one row to the next."""

    def __init__(self, experts: int) -> None:
        self._pairs = np.zeros((experts, experts))
        self._rows = np.zeros(experts)
        self.before: list[int] = []  # the latest row's experts

    def add(self, row: Sequence[int]) -> None:
        for expert in self.before:
            self._rows[expert] += 1
            self._pairs[expert, row] += 1
        self.before = list(row)

    def chances(self) -> npt.NDArray[np.float64]:
        """Of each expert, to follow the latest row."""
        if not self.before:
            return np.zeros(len(self._rows))
        rows = self._rows[self.before, None] + SUCCESSOR_PRIOR
        chances: npt.NDArray[np.float64] = (self._pairs[self.before] / rows).mean(axis=0)
        return chances


class Decoding:
    """The decoded tokens of a trace, one after the other.

    Attributes:
        now, stall_s: seconds since the first token; of those, waiting for bytes.
        useful, wasted: bytes that were read for guesses, by what became of them.
    """

    def __init__(
        self, trace: RouteTrace, budget: int, machine: Machine, guesser: str, least: float,
        depth: int, limit: int,
    ) -> None:  # fmt: skip
        self._trace, self._machine, self._lanes = trace, machine, Lanes(machine)
        self._guesser, self._least, self._depth, self._limit = guesser, least, depth, limit
        self._experts = 1 + max(max(batch.experts) for batch in trace.batches)
        self._cache = ExpertCache(budget, trace.expert_bytes, eviction("decay", self._experts))
        self._followers = {layer: Followers(self._experts) for layer in trace.expert_bytes}
        self._guesses: dict[int, dict[int, list[Read]]] = {n: {} for n in trace.expert_bytes}
        self.now = self.stall_s = self.useful = self.wasted = 0.0
        self.tokens, self._random = 0, np.random.default_rng(0)

    def run(self) -> Decoding:
        tokens = self._trace.decoded_tokens()
        first = tokens[0][0]
        for batch in self._trace.batches[:first]:
            self._lookup(batch)
        order = [self._trace.batches[index] for token in tokens for index in token]
        for at, batch in enumerate(order):
            self._layer(batch, order[at + 1 : at + 1 + self._depth])
        self.tokens = len(tokens)
        return self

    def _lookup(self, batch: Batch) -> list[int]:
        for row in [batch.experts] if batch.rows is None else batch.rows.tolist():
            self._followers[batch.layer].add(row)
        return self._cache.lookup(batch.layer, batch.experts, batch.rows).misses

    def _layer(self, batch: Batch, later: list[Batch]) -> None:
        machine = self._machine
        experts_s = machine.compute_s * machine.expert_share
        self.now += machine.compute_s - experts_s
        self._lanes.advance(self.now)
        self._lanes.guessed.clear()
        slices = self._demand(batch)
        for one in later if self._guesser != "nothing" else ():
            self._guess(one)
        for of in slices:
            stall_s = max(0.0, self._lanes.wait(of) - self.now)
            self.stall_s += stall_s
            self.now += stall_s + experts_s / PROJECTIONS

    def _demand(self, batch: Batch) -> list[list[Read]]:
        """The layer's reads by projection, with those of guesses that lanes have begun."""
        misses = self._lookup(batch)
        guesses, self._guesses[batch.layer] = self._guesses[batch.layer], {}
        slices: list[list[Read]] = [[] for _ in range(PROJECTIONS)]
        for expert in misses:
            for of, read in zip(slices, guesses.pop(expert, self._reads(batch.layer)), strict=True):
                self.useful += read.nbytes if read.arrives is not None else 0
                of.append(read)
        self._lanes.demand.extend(read for of in slices for read in of if read.arrives is None)
        self.wasted += sum(
            read.nbytes for of in guesses.values() for read in of if read.arrives is not None
        )
        return slices

    def _guess(self, batch: Batch) -> None:
        score = self._scores(batch)
        order = np.argsort(-score, kind="stable")
        absent = [
            expert
            for expert in order[score[order] >= self._least].tolist()
            if (batch.layer, expert) not in self._cache
        ]
        guesses = self._guesses[batch.layer]
        for expert in absent[: self._limit]:
            reads = guesses.setdefault(expert, self._reads(batch.layer))
            self._lanes.guessed.extend(read for read in reads if read.arrives is None)

    def _reads(self, layer: int) -> list[Read]:
        nbytes = self._trace.expert_bytes[layer] / PROJECTIONS
        return [Read(nbytes) for _ in range(PROJECTIONS)]

    def _scores(self, batch: Batch) -> npt.NDArray[np.float64]:
        """What the guesser makes of each expert of a layer that comes next."""
        if self._guesser == "followers":
            return self._followers[batch.layer].chances()
        named = np.array(batch.experts)
        if self._guesser == "before":
            named = np.array(self._followers[batch.layer].before, int)
        elif self._guesser == "router":
            wrong = self._random.random(len(named)) >= self._least
            named[wrong] = self._random.integers(0, self._experts, int(wrong.sum()))
        score = np.zeros(self._experts)
        score[named] = 1
        return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--cache-mb", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--bandwidth", type=int, nargs="+", default=[600, 1200, 2400, 4800])
    parser.add_argument("--compute-ms", type=float, default=1.5, help="of a layer")
    parser.add_argument("--depth", type=int, default=1, help="layers to guess ahead")
    parser.add_argument("--limit", type=int, default=4, help="experts of a layer at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace, records = read_trace(options.trace), []
    for cache, bandwidth in product(options.cache_mb, options.bandwidth):
        machine = Machine(bandwidth * MIB, options.compute_ms / 1e3).validate()
        plain = 0.0
        for guesser, least in CASES:
            found = Decoding(
                trace, cache * MIB, machine, guesser, least, options.depth, options.limit
            ).run()
            token_ms, stall_ms = (1e3 * s / found.tokens for s in (found.now, found.stall_s))
            plain = plain or token_ms
            wasted = found.wasted / found.useful if found.useful else 0.0
            records.append(
                {
                    "cache_mb": cache, "bandwidth": bandwidth, "guesser": guesser, "least": least,
                    "token_ms": token_ms, "stall_ms": stall_ms, "shorter": 1 - token_ms / plain,
                    "useful_mib": found.useful / MIB / found.tokens, "wasted_per_useful": wasted,
                }
            )  # fmt: skip
            print(
                f"{cache} MiB, {bandwidth} MiB/s, {guesser:9} {least:.1f}: {token_ms:.1f} ms "
                f"({-100 * records[-1]['shorter']:+.1f} %), stall {stall_ms:.1f}; a token's useful "
                f"{records[-1]['useful_mib']:.1f} MiB, wasted {wasted:.2f} x as much",
                flush=True,
            )
    if options.json:
        write_json(options.json, records)


if __name__ == "__main__":
    main()
