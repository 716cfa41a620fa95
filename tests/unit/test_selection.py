"""How a router chooses experts: the selection rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from routeahead.routing.selection import SelectionRule


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def test_ranks_by_logit_and_takes_the_lower_id_of_equals() -> None:
    rule = SelectionRule(3, "softmax")
    assert rule.select(floats(1, 5, 5, -2, 5)).tolist() == [1, 2, 4]
    assert rule.select(floats(1, 5, 5, -2, 5)).dtype == np.int32


def test_router_bias_comes_before_the_activation_and_selection_bias_after() -> None:
    logits, bias = floats(0, 1, 2, 3), floats(0, 0, 0.6, 0)
    # Sigmoid squeezes: 0.6 more than sigmoid(2) is above sigmoid(3), and 0.6 more than 2 is not.
    assert SelectionRule(2, "sigmoid", selection_bias=bias).select(logits).tolist() == [2, 3]
    assert SelectionRule(2, "sigmoid", router_bias=bias).select(logits).tolist() == [3, 2]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "sqrt_softplus", "none"])
def test_scores_with_a_selection_bias(activation: str) -> None:
    logits = np.linspace(-8, 9, 8).astype(np.float32)
    bias = np.linspace(0.5, -0.5, 8).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = {
        "softmax": np.exp(wide) / np.exp(wide).sum(),
        "sigmoid": 1 / (1 + np.exp(-wide)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(wide))),
        "none": wide,
    }[activation]
    rule = SelectionRule(2, activation, selection_bias=bias)  # type: ignore[arg-type]
    np.testing.assert_allclose(rule.scores(logits), expected + bias, rtol=1e-6, atol=1e-6)


def test_groups_compete_by_their_two_best() -> None:
    logits = floats(9, -9, -9, -9, 2, 2, -9, -9, 1.5, 1.5, -9, -9)
    rule = SelectionRule(3, "none", groups=3, groups_used=1)
    assert rule.select(logits).tolist()[:2] == [4, 5]  # 2 + 2 beats 9 - 9 and 1.5 + 1.5
    assert np.isneginf(rule.scores(logits)[[0, 8, 9]]).all()


def test_extreme_logits_are_no_warning() -> None:
    rule = SelectionRule(1, "sigmoid", selection_bias=floats(0, 0))
    with np.errstate(all="raise", under="ignore", over="raise"):
        assert rule.select(floats(-1000, 3)).tolist() == [1]
