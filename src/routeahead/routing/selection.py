"""The rule by which a model chooses experts from its router's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from routeahead.types import Floats

Activation = Literal["none", "softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True)
class SelectionRule:
    """Logits of one row → the experts that the model's graph would choose.

    Follows llama.cpp's `build_moe_ffn`: router bias, activation, selection bias (DeepSeek-V3's
    `exp_probs_b`), then, with groups, only the best groups compete, a group being worth the sum of
    its two best scores.

    Attributes:
        top_k: experts chosen.
        router_bias: float32 (n_expert,), added to the logits; None: no bias.
        selection_bias: float32 (n_expert,), sways the selection and not the weights; None: no bias.
        groups: number of groups of equal size; 0: experts compete with all others.
        groups_used: groups that stay in the race.
        weighing: the activation that gives the *probabilities*, from which the graph gathers the
            weights of the chosen; None if it is not known. It is another one in Llama 4.
    """

    top_k: int
    activation: Activation
    router_bias: Floats | None = None
    selection_bias: Floats | None = None
    groups: int = 0
    groups_used: int = 0
    weighing: Activation | None = None

    @property
    def steps(self) -> tuple[object, ...]:
        """The rule without its biases, which are weights of a layer."""
        return self.top_k, self.activation, self.groups, self.groups_used, self.weighing

    def select(self, logits: Floats) -> npt.NDArray[np.int32]:
        """Ids int32 (top_k,) in descending order of selection score; the lower id first where two
        are equal (the graph's own order of equals is unspecified)."""
        scores = self.scores(logits)
        order: npt.NDArray[np.intp] = np.argsort(-scores, kind="stable")
        return order[: self.top_k].astype(np.int32)

    def among_groups(self, scores: Floats, more: int = 0) -> npt.NDArray[np.int32]:
        """The same of selection scores (n_expert,) before groups compete, and the `more` experts
        that come next, those of the groups that lost last."""
        order: npt.NDArray[np.intp] = np.lexsort((-scores, -self._masked(scores)))
        return order[: self.top_k + more].astype(np.int32)

    def scores(self, logits: Floats) -> Floats:
        """Numbers (n_expert,) by which the experts rank; -inf for those out of the race.

        They are the graph's selection scores, except that an activation which leaves the order as
        it is (all of them do) is left out where nothing is added to its result.
        """
        if self.router_bias is not None:
            logits = logits + self.router_bias
        if self.selection_bias is None and not self.groups:
            return logits
        scores = _ACTIVATE[self.activation](logits)
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        return self._masked(scores) if self.groups else scores

    def shares(self, probabilities: Floats, ids: npt.NDArray[np.int32]) -> Floats:
        """Shares (len(ids),) of the routing's mass that the experts `ids` would have: weight over
        sum of weights. Neither normalising nor scaling the weights changes them."""
        chosen = probabilities[ids]
        if self.weighing in (None, "none"):  # there is a softmax over the selected (gpt-oss)
            return _softmax(chosen)
        shares: Floats = chosen / max(chosen.sum(), np.finfo(np.float32).tiny)
        return shares

    def _masked(self, scores: Floats) -> Floats:
        grouped = scores.reshape(self.groups, -1)
        worth = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
        losers = np.argsort(-worth, kind="stable")[self.groups_used :]
        masked: Floats = grouped.copy()
        masked[losers] = -np.inf
        return masked.reshape(-1)


def _softmax(logits: Floats) -> Floats:
    powers: Floats = np.exp(logits - logits.max())
    scores: Floats = powers / powers.sum()
    return scores


def _sigmoid(logits: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp of a very negative logit: the score is 0 then
        scores: Floats = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return scores


def _sqrt_softplus(logits: Floats) -> Floats:
    scores: Floats = np.sqrt(np.logaddexp(np.float32(0), logits))
    return scores


_ACTIVATE: dict[Activation, Callable[[Floats], Floats]] = {
    "none": lambda logits: logits,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}
