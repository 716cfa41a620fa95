"""What a policy is: what it sees of each routing, and what it may do about it.

In one layer of one ubatch the hooks come in this order, all on the evaluation thread:

1. `routed`: the router has chosen. A policy may choose otherwise.
2. The layer's missing experts are queued for reading. If a policy waits for the weights, this
   comes after step 4 instead.
3. `predict`: the hidden row can be read for the last time.
4. `weighted`: the final weights are known, and nothing has been computed with them. A policy may
   drop experts.
5. `issued`: the layer's reads are queued. A policy may have others read behind them.
6. `product`: an expert product of the layer is about to run, and its bytes have arrived. Only
   while reads of the layer are pending.

Before all of them, if a policy wants it, comes `before_attention`.

`docs/policy-api.md` shows them at work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from routeahead.errors import PolicyError
from routeahead.routing.selection import SelectionRule
from routeahead.telemetry.counters import Totals
from routeahead.types import Floats, Ids, Phase

Precision = Literal["f32", "f16", "int8"]
HALF = 0.5
"""The depth at which a layer's experts are predicted from what its own attention is given."""

P = TypeVar("P", bound="Policy")


class Experts(Protocol):
    """What a policy may ask of the cache and the lanes; `experts.source.ExpertSource` has it."""

    def resident(self, layer: int, expert: int) -> bool:
        """Whether using the expert would cause no read."""
        ...

    def cached(self, layer: int, expert: int) -> bool:
        """Whether the cache has the expert by its books, which have what a committed read is
        bringing. Unlike `resident`, that never depends on how fast a read is."""
        ...

    def read_early(self, layer: int, experts: Sequence[int]) -> None:
        """Reads what a later `layer` of this token will certainly use. Never cancelled."""
        ...

    def guess(self, layer: int, experts: Sequence[int], limit: int | None = None) -> None:
        """Reads what a later `layer` may use, likeliest first, at most `limit` absent ones.

        Cancelled as soon as a layer waits for bytes.
        """
        ...

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        """Keeps what is resident of the `experts` of a later `layer` until it has been there."""
        ...


class Ranking(NamedTuple):
    """What a router says of one hidden row.

    Attributes:
        ids: int32 (top_k,), best first; longer where more were asked for.
        probabilities: float32 (n_expert,), what the chosen experts' weights are gathered from; None
            if they are not known.
    """

    ids: Ids
    probabilities: Floats | None = None


class Ranker(Protocol):
    """Ranks experts as a layer's own router would, on any hidden row.

    Attributes:
        convert_s: seconds that storing router matrices has taken.
    """

    convert_s: float

    def prepare(self) -> None:
        """Makes the routers usable that the graph has shown by now. Call it in `Policy.begin`."""
        ...

    def __contains__(self, layer: object) -> bool:
        """Whether the layer's router is known and understood."""
        ...

    def seen(self, layer: int) -> bool:
        """Whether the graph has shown how the layer chooses; it may not be understood."""
        ...

    def expected(self, layer: int) -> float | None:
        """Share of slots (0 to 1) on which `predict` agreed with the layer's router when it was
        calibrated; None if it was not."""
        ...

    def rule(self, layer: int) -> SelectionRule:
        """What turns the layer's logits into a selection."""
        ...

    def logits(self, layer: int, hidden: Floats) -> Floats:
        """Logits (n_expert,) in memory that the next call for the layer reuses."""
        ...

    def rank(self, layer: int, hidden: Floats) -> Ids:
        """Ids (top_k,), best first."""
        ...

    def matrix(self, layer: int) -> Floats:
        """The layer's own router matrix (n_expert, width), as a copy."""
        ...

    def predict(self, layer: int, hidden: Floats, more: int = 0) -> Ranking:
        """The ranking that predicts what `layer` will choose, from an earlier layer's hidden
        row, with the `more` experts that come next, or without the last ones, if negative."""
        ...

    def best(self, layer: int, hidden: Floats, more: int = 0) -> Ids:
        """The ids of `predict` alone, which may be quicker."""
        ...

    def own(self, layer: int, hidden: Floats) -> Floats | None:
        """Probabilities (n_expert,) of the layer's own router, in memory that the next call for
        the layer reuses; None if the graph does not show what it gathers weights from."""
        ...

    def lend(self, layer: int, target: int, *, hidden: bool) -> bool:
        """Called at a routing: the router of `layer`, which is routed next, is to rank the experts
        of `target` instead of its own. Returns whether the two are alike, so that it will.

        `hidden`: whether the layer's hidden row is wanted nevertheless.
        """
        ...


@dataclass(frozen=True)
class Model:
    """What a policy is told of the model that it is for.

    Attributes:
        layers: numbers of the MoE layers, in order.
        n_expert: experts in each of them.
        top_k: experts that a token routes to, in the layer that uses most.
        width: numbers in a hidden row.
        experts: the cache and the lanes.
        ranker: makes a `Ranker` with router matrices of that precision.
        policies: all policies of this model, in the order of their hooks.
        top_k_by_layer: where layers differ in it.
    """

    layers: Sequence[int]
    n_expert: int
    top_k: int
    width: int
    experts: Experts
    ranker: Callable[[Precision], Ranker]
    policies: Sequence[Policy] = ()
    top_k_by_layer: Mapping[int, int] = field(default_factory=dict)
    _index: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {layer: i for i, layer in enumerate(self.layers)})

    def find(self, kind: type[P]) -> P | None:
        """The policy of that class; None if there is none."""
        return next((policy for policy in self.policies if isinstance(policy, kind)), None)

    def after(self, layer: int, count: int) -> Sequence[int]:
        """The next `count` MoE layers after `layer`, nearest first; fewer near the end."""
        start = self._index[layer] + 1
        return self.layers[start : start + count]

    def later(self, layer: int, depth: int) -> int | None:
        """The MoE layer `depth` layers after `layer`; None if there is none."""
        index = self._index[layer] + depth
        return self.layers[index] if index < len(self.layers) else None


class Routing:
    """One layer's routing of one ubatch.

    Attributes:
        phase: what the engine declared this batch to be.
        layer: the layer's number in the model.
        positions: int64 (rows,), each row's position in the sequence.
        ids: int32 (rows, top-k), the experts; read-only, see `choose`.
        hidden: float32 (rows, width), what the layer's router was given; read-only, valid until
            `predict` returns. None if no policy wants it, and if it could not be read.
        weights: float32 (rows, top-k), final; read-only. None before `Policy.weighted`.
        dropped: bool (rows, top-k), slots that were dropped; None if there are none.
        committed: whether a policy has chosen.
        ranked_for: the later layer whose experts `ids` are, because this layer's router was lent
            to it (`Ranker.lend`); who lent it chooses this layer's. None otherwise.
    """

    __slots__ = (
        "_experts", "_graph_ids", "_graph_weights", "_n_expert", "_probabilities", "_scores",
        "committed", "dropped", "hidden", "ids", "layer", "phase", "positions", "ranked_for",
        "weights",
    )  # fmt: skip

    def __init__(
        self,
        phase: Phase,
        layer: int,
        positions: npt.NDArray[np.int64],
        ids: Ids,
        *,
        n_expert: int,
        experts: Experts,
        scores: Callable[[], Floats | None],
        hidden: Floats | None = None,
        ranked_for: int | None = None,
        probabilities: Callable[[], Floats | None] = lambda: None,
    ) -> None:
        """
        Makes a routing over the graph's own memory.

        Args:
            ids: the graph's; what is written there is what the layer computes with, and an id
                that is no expert would end the process.
            scores: see `scores`.
            probabilities: see `probabilities`; the graph's own memory.
        """
        self.phase, self.layer, self.positions = phase, layer, positions
        self._graph_ids, self.ids = ids, _read_only(ids)
        self._n_expert, self._experts, self._scores = n_expert, experts, scores
        self.hidden, self.ranked_for, self._probabilities = hidden, ranked_for, probabilities
        self._graph_weights: Floats | None = None
        self.weights: Floats | None = None
        self.dropped: npt.NDArray[np.bool_] | None = None
        self.committed = False

    def scores(self) -> Floats | None:
        """Float32 (rows, n_expert), what the router has just ranked the experts by.

        Biases included, -inf for experts that are out of the race. Valid in `Policy.routed` only;
        not to be written to. None if a table, and not the router, gives each token its experts, or
        if the router was lent.
        """
        return self._scores()

    def probabilities(self) -> Floats | None:
        """Float32 (rows, n_expert), what the weights will be gathered from, as a copy.

        Valid in `Policy.routed` only. None if the graph does not show it.
        """
        found = self._probabilities()
        return None if found is None else found.copy()

    def weigh_by(self, probabilities: Floats) -> None:
        """Has the weights gathered from these (rows, n_expert), in `Policy.routed` only.

        Raises:
            PolicyError: another shape, or the graph does not show where.
        """
        place = self._probabilities()
        if place is None or place.shape != probabilities.shape:
            raise PolicyError(
                f"layer {self.layer}: its weights cannot be gathered from "
                f"{probabilities.dtype} {probabilities.shape}"
            )
        place[:] = probabilities

    def resident(self, expert: int) -> bool:
        """Whether using the expert in this layer would cause no read."""
        return self._experts.resident(self.layer, expert)

    def cached(self, expert: int) -> bool:
        """Whether the cache has the expert, whatever has arrived of it (`Experts.cached`)."""
        return self._experts.cached(self.layer, expert)

    def choose(self, ids: npt.ArrayLike, row: int | None = None) -> None:
        """Replaces the selection, in `Policy.routed` only.

        The weights will be the router's own for these experts.

        Args:
            ids: integers (rows, top-k), or (top-k,) for one `row`.

        Raises:
            PolicyError: another shape, or an id that is no expert. Nothing is changed then.
        """
        chosen = np.asarray(ids)
        target: Ids = self._graph_ids if row is None else self._graph_ids[row]
        if chosen.shape != target.shape or chosen.dtype.kind not in "iu":
            raise PolicyError(
                f"layer {self.layer}: a policy chose experts as {chosen.dtype} {chosen.shape}: "
                f"give integers {target.shape}"
            )
        listed = chosen.ravel().tolist()
        if listed and not 0 <= min(listed) <= max(listed) < self._n_expert:
            wrong = next(e for e in listed if not 0 <= e < self._n_expert)
            raise PolicyError(
                f"layer {self.layer}: a policy chose expert {wrong}, and there are "
                f"{self._n_expert}: give 0 to {self._n_expert - 1}"
            )
        target[:] = chosen
        self.committed = True

    def weigh(self, weights: Floats) -> None:
        """The engine's: the graph's final weights, in its own memory."""
        self._graph_weights, self.weights = weights, _read_only(weights)

    def drop(self, slots: npt.NDArray[np.bool_], *, renorm: bool = False) -> None:
        """Leaves experts out of the layer, in `Policy.weighted` only.

        A dropped slot's weight becomes 0 and its id that of the heaviest slot that its row keeps,
        so that no byte is touched that was not read.

        Args:
            slots: bool (rows, top-k), what to drop.
            renorm: the others' weights are scaled to the row's sum.

        Raises:
            PolicyError: the weights are not known yet, another shape, or a row that keeps nothing.
        """
        if self._graph_weights is None:
            raise PolicyError(f"layer {self.layer}: a policy can drop in `weighted` only")
        gone = slots if self.dropped is None else self.dropped | slots
        rows = gone.tolist()
        if gone.shape != self._graph_ids.shape or any(map(all, rows)):
            raise PolicyError(
                f"layer {self.layer}: a policy dropped {slots.dtype} {slots.shape}: give booleans "
                f"{self._graph_ids.shape} that leave each row an expert"
            )
        self.dropped = gone
        for number, row in enumerate(rows):
            if True in row:
                self._drop(self._graph_ids[number], self._graph_weights[number], row, renorm)

    def _drop(self, ids: Ids, weights: Floats, gone: Sequence[bool], renorm: bool) -> None:
        before: list[float] = weights.tolist()
        kept = [-np.inf if out else w for out, w in zip(gone, before, strict=True)]
        slots = [slot for slot, out in enumerate(gone) if out]
        ids[slots] = ids[kept.index(max(kept))]
        weights[slots] = 0
        if renorm:
            weights *= np.float32(sum(before) / sum(weights.tolist()))


class Policy:
    """Base of all policies; its hooks do nothing.

    Derive from it and override the hooks that you need: those that are not overridden are never
    called. An exception in a hook ends the generation, reaches the caller, and leaves the model
    usable.

    Attributes:
        name: key of `report` in a run's JSON.
        reads_early: what the report calls the early reads of this policy; empty if it makes none.
    """

    name = ""
    reads_early = ""

    def bind(self, model: Model) -> None:
        """The model is loaded. Called once, in the order of the policies.

        Raises:
            SettingsError: this policy does not fit the model.
        """

    def wants_hidden(self, phase: Phase) -> bool:
        """Whether `Routing.hidden` is needed in this batch; asked after `begin`."""
        return False

    def wants_attention_input(self, phase: Phase) -> bool:
        """Whether `before_attention` is to be called in this batch, at a further stop of the graph
        in each layer; asked after `begin`."""
        return False

    def wants_weights(self, phase: Phase) -> bool:
        """Whether a layer's reads have to wait for `weighted` in this batch; asked after `begin`.

        Without it, `weighted` is not called.
        """
        return False

    def begin(self, phase: Phase, position: int) -> None:
        """A batch is about to be evaluated; its first row stands at `position`."""

    def before_attention(self, layer: int, hidden: Floats) -> None:
        """The attention of an MoE `layer` is about to be given `hidden`, float32 (rows, width),
        the output of its norm; valid during this call. The last layer may route fewer rows."""

    def routed(self, routing: Routing) -> None:
        """A layer's router has chosen."""

    def predict(self, routing: Routing) -> None:
        """The same routing, as it was decided; `hidden` can be read for the last time."""

    def weighted(self, routing: Routing) -> None:
        """The routing's final weights are known; nothing was read for it yet."""

    def issued(self, routing: Routing) -> None:
        """The layer's reads are with the lanes."""

    def product(self, layer: int) -> None:
        """An expert product of the layer is about to run, while later ones may wait for bytes."""

    def end(self) -> None:
        """The batch was evaluated."""

    def recover(self) -> None:
        """After a fault: nothing of the void batch is of use, and the cache is empty."""

    def close(self) -> None:
        """The model is being closed."""

    def count(self, totals: Totals) -> None:
        """Adds what it has counted since the load; the engine takes the differences by batch."""

    def report(self, decode: Totals) -> dict[str, Any]:
        """What this policy did since the load, as JSON has it; `decode`: the run's totals."""
        return {}

    def lines(self, decode: Totals) -> list[str]:
        """The same as lines for a terminal."""
        return []


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view: npt.NDArray[Any] = array.view()
    view.flags.writeable = False
    return view
