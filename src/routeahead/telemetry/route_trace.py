"""A routing trace: which experts each token routed to, layer by layer, as a run recorded it.

A table (`telemetry.table`) whose facts are `{"layers": {"L": B, ...}}`: bytes of an expert of
layer L. In a CSV without facts, lines `# layer=L expert_bytes=B` on top say it. Columns: `phase`
(0 = prefill, 1 = decode), `step` (position of the token), `layer`, `slot`, `expert`; others are
ignored. Lines are in the order in which the graph routed them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from routeahead.errors import RouteAheadError
from routeahead.telemetry.table import Contents, read_table
from routeahead.types import Ids, Phase

Slots = npt.NDArray[np.int64]

PHASES: tuple[Phase, Phase] = ("prefill", "decode")  # by the number in the file
COLUMNS = ("phase", "step", "layer", "slot", "expert")

_LAYER_FACT = re.compile(r"layer=(\d+)\s+expert_bytes=(\d+)\b")


class TraceError(RouteAheadError, ValueError):
    """The trace cannot be used: it is missing, malformed, or has nothing to replay."""


@dataclass(frozen=True)
class Batch:
    """What one layer looks up at one moment.

    Attributes:
        step: position of the (first) token.
        experts: distinct, in order of first appearance: a token's top-k in slot order, or the
            union over the rows of a prompt's ubatch or of guesses to verify, row by row.
        rows: int32 (rows, top-k), the experts of each row; None if it has one row.
    """

    phase: Phase
    step: int
    layer: int
    experts: tuple[int, ...]
    rows: Ids | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RouteTrace:
    """A recorded run.

    Attributes:
        expert_bytes: bytes of one expert (all its projections), by layer.
        batches: in the order of the run.
        slots: int64 (routed slots, 5), the columns of COLUMNS as recorded.
    """

    expert_bytes: dict[int, int]
    batches: list[Batch]
    slots: Slots = field(
        default_factory=lambda: np.empty((0, len(COLUMNS)), np.int64), compare=False, repr=False
    )

    @classmethod
    def of(cls, slots: Slots, expert_bytes: dict[int, int]) -> RouteTrace:
        """A run that routed `slots`, as they would be recorded.

        Raises:
            TraceError: no run routes so.
        """
        return cls(expert_bytes, _batches(slots, expert_bytes), slots)

    def selections(self) -> dict[tuple[int, int], Ids]:
        """(step, layer) → int32 (top-k,), the experts of that token in slot order."""
        step, layer = self.slots[:, 1], self.slots[:, 2]
        begins = np.flatnonzero((np.diff(step) != 0) | (np.diff(layer) != 0)) + 1
        pieces = np.split(self.slots, begins)
        return {(int(p[0, 1]), int(p[0, 2])): p[:, 4].astype(np.int32) for p in pieces}

    def first_layers(self, count: int) -> RouteTrace:
        """The same run of a model that ends after its first `count` MoE layers.

        A model's last layer routes only the last token of a prompt, whose output alone is used.
        """
        kept = sorted(self.expert_bytes)[:count]
        phase, step, layer = self.slots[:, :3].T
        prompt = step[phase == PHASES.index("prefill")]
        inner = np.isin(step, prompt) & np.isin(step + 1, prompt) & (phase == 0)
        slots = self.slots[np.isin(layer, kept) & ~(inner & (layer == kept[-1]))]
        facts = {layer: self.expert_bytes[layer] for layer in kept}
        return RouteTrace(facts, _batches(slots, facts), slots)

    def counting(self, warmup: int, tokens: int | None = None) -> RouteTrace:
        """The same run, of which only some decoded tokens count.

        These are `tokens` (None: all) after the first `warmup`. Those before them become a part of
        the prompt, which only fills a cache; those after them are left out.

        Raises:
            TraceError: no token is left to count.
        """
        decoded = self.decoded_tokens()
        counted = decoded[warmup:][:tokens]
        if not counted:
            raise TraceError(f"{len(decoded)} decoded tokens: none is left after {warmup}")
        first, last = counted[0][0], counted[-1][-1]
        before = [replace(batch, phase="prefill") for batch in self.batches[:first]]
        return RouteTrace(self.expert_bytes, [*before, *self.batches[first : last + 1]], self.slots)

    def decoded_tokens(self) -> list[list[int]]:
        """For each decoded token, the indices of its batches.

        A token passes through its layers in order: the next one begins when the layer number does
        not rise.
        """
        tokens: list[list[int]] = []
        layer_before: int | None = None
        for index, batch in enumerate(self.batches):
            if batch.phase == "prefill":
                layer_before = None
                continue
            if layer_before is None or batch.layer <= layer_before:
                tokens.append([])
            tokens[-1].append(index)
            layer_before = batch.layer
        return tokens


def read_trace(path: str | os.PathLike[str]) -> RouteTrace:
    """Reads a CSV or Parquet trace; a CSV that ends inside a row up to there, with a warning.

    Raises:
        TraceError: the file is missing or malformed.
    """
    path = Path(path)
    try:
        contents = read_table(path, dict.fromkeys(COLUMNS, "int64"))
        facts = _expert_bytes(contents)
        slots = np.stack([contents.columns[name] for name in COLUMNS], axis=1)
        return RouteTrace(facts, _batches(slots, facts), slots)
    except OSError as error:
        raise TraceError(f"{path}: {_one_line(error.strerror or error)}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except ValueError as error:  # from a library: bytes, a line or a number that it cannot read
        raise TraceError(f"{path}: not a routing trace: {_one_line(error)}") from error


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())


def _expert_bytes(contents: Contents) -> dict[int, int]:
    """Bytes of one expert by layer, from the facts or the head of a CSV without any."""
    if contents.facts is None:
        found = [_LAYER_FACT.match(line) for line in contents.head]
        return {int(fact[1]): int(fact[2]) for fact in found if fact}
    try:
        layers = contents.facts["layers"]
        return {int(layer): int(size) for layer, size in layers.items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise TraceError("its facts (JSON) do not have 'layers'") from error


def _batches(slots: Slots, facts: dict[int, int]) -> list[Batch]:
    """Cuts `slots` [n, len(COLUMNS)] into batches.

    The ubatches of a prefill are told apart by the layer that changes between them, so the
    ubatches of a model with a single MoE layer come out as one.
    """
    _check(slots, facts)
    phase, step, layer, slot, expert = slots.T
    new_layer = (np.diff(phase) != 0) | (np.diff(layer) != 0)
    new_token = new_layer | (np.diff(step) != 0)
    unordered = ~new_token & (np.diff(slot) <= 0)
    if unordered.any():
        at = int(np.argmax(unordered)) + 1
        raise TraceError(
            f"entry {at + 1}: slot {slot[at]} follows slot {slot[at - 1]} of its token"
        )
    # Decoded tokens in the same layer are rows of one batch, unless there is no other layer.
    decode = (phase[1:] == PHASES.index("decode")) & (len(np.unique(layer)) == 1)
    begins = new_layer | (new_token & decode)
    starts = [0, *(np.flatnonzero(begins) + 1).tolist()]
    ends = [*starts[1:], len(slots)]
    ids, counts = expert.astype(np.int32), np.diff(np.flatnonzero(np.r_[True, new_token, True]))
    rows = np.searchsorted(np.cumsum(counts), [*starts, len(slots)], side="right")
    return [
        Batch(
            PHASES[phase[start]],
            int(step[start]),
            int(layer[start]),
            tuple(dict.fromkeys(ids[start:end].tolist())),
            _rows(ids[start:end], counts[first:last]),
        )
        for start, end, first, last in zip(starts, ends, rows[:-1], rows[1:], strict=True)
    ]


def _rows(ids: Ids, counts: npt.NDArray[np.int64]) -> Ids | None:
    """`ids`, of which each row has as many as `counts` says, as rows; None if there is only one.

    Layers choose as many for each row. Where a trace does not, rows repeat their last.
    """
    if len(counts) == 1:
        return None
    width = int(counts.max())
    if len(ids) == width * len(counts):
        return ids.reshape(len(counts), width)
    starts = np.cumsum(counts) - counts
    rows: Ids = ids[starts[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)]
    return rows


def _check(slots: Slots, facts: dict[int, int]) -> None:
    if not len(slots):
        raise TraceError("no routed slot in it")
    phase, _, layer, _, expert = slots.T
    unknown = sorted(
        set(np.unique(layer).tolist()) - {at for at, size in facts.items() if size > 0}
    )
    if unknown:
        raise TraceError(
            f"its header does not say how many bytes an expert of layer {unknown[0]} has"
        )
    for name, wrong in (("phase", (phase != 0) & (phase != 1)), ("expert", expert < 0)):
        if wrong.any():
            at = int(np.argmax(wrong))
            value = slots[at, COLUMNS.index(name)]
            raise TraceError(f"entry {at + 1}: there is no {name} {value}")
