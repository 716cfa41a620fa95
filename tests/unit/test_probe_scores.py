"""What the probe counts."""

from __future__ import annotations

import numpy as np

from routeahead.prediction.scores import CONTROL, PredictorScores


def test_a_probe_that_is_off_says_so() -> None:
    probe = PredictorScores([0], n_expert=4)
    probe.begin()
    probe.predict(CONTROL, 0, np.array([1, 2], np.int32))
    probe.routed(0, np.array([[1, 3]], np.int32), score=True)
    assert not probe.sound and probe.total(CONTROL).overlap == 0.5
    assert probe.total(CONTROL).accuracy == 0.0
