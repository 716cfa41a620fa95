"""Calibration's arithmetic, its documents and its files, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from routeahead.calibration.documents import read_documents
from routeahead.calibration.moments import Moments, Pair, pairs_of, ridge
from routeahead.calibration.scoring import Scoring, agreed
from routeahead.errors import SettingsError
from routeahead.prediction.gates import Gate, Gates, check_depth, read_gates, write_gates
from routeahead.routing.selection import SelectionRule
from routeahead.telemetry.tensor_file import read_tensors, write_tensors
from routeahead.types import Floats

WIDTH, EXPERTS = 24, 8
RNG = np.random.default_rng(0)
ROUTER = RNG.normal(size=(EXPERTS, WIDTH)).astype(np.float32)


def moments_of(hidden: Floats, logits: Floats) -> tuple[np.ndarray, np.ndarray]:
    pair = Pair(0, 1, 1)
    moments = Moments([pair], WIDTH, EXPERTS)
    for rows in np.array_split(np.arange(len(hidden)), 5):
        x, y = hidden[rows].astype(np.float64), logits[rows].astype(np.float64)
        moments.add_source(0, x)
        moments.add_pair(pair, x, y)
    return moments.gram[0], moments.cross[pair]


def test_ridge_is_the_least_squares_solution_about_the_router() -> None:
    """Compared with a solver that sees every row: the penalty becomes rows of its own."""
    hidden = RNG.normal(size=(200, WIDTH)).astype(np.float32)
    logits = RNG.normal(size=(200, EXPERTS)).astype(np.float32)
    gram, cross = moments_of(hidden, logits)
    penalties = (1e-3, 0.5)
    for penalty, found in zip(penalties, ridge(gram, cross, ROUTER, penalties), strict=True):
        root = np.sqrt(penalty * np.trace(gram) / WIDTH)
        rows = np.vstack([hidden, root * np.eye(WIDTH)])
        wanted = np.vstack([logits, root * ROUTER.T])
        solved = np.linalg.lstsq(rows.astype(np.float64), wanted, rcond=None)[0].T
        np.testing.assert_allclose(found, solved, atol=1e-5)


def test_a_text_that_says_nothing_leaves_the_router() -> None:
    """Directions that no hidden vector has stay what they were; those that have, are fitted."""
    hidden = RNG.normal(size=(50, WIDTH)).astype(np.float32)
    hidden[:, 12:] = 0
    target = RNG.normal(size=(EXPERTS, WIDTH)).astype(np.float32)
    [found] = ridge(*moments_of(hidden, hidden @ target.T), ROUTER, [1e-6])
    np.testing.assert_allclose(found[:, 12:], ROUTER[:, 12:], atol=1e-5)
    np.testing.assert_allclose(found[:, :12], target[:, :12], atol=1e-3)


def test_pairs_and_their_memory() -> None:
    layers = [1, 2, 5, 9]
    pairs = pairs_of(layers, [1, 2], layers)
    assert [(p.source, p.target, p.depth) for p in pairs] == [
        (1, 2, 1), (2, 5, 1), (1, 5, 2), (5, 9, 1), (2, 9, 2),
    ]  # fmt: skip
    moments = Moments(pairs, WIDTH, EXPERTS)
    held = sum(array.nbytes for array in moments.named().values())
    assert held == Moments.nbytes(pairs, WIDTH, EXPERTS)
    assert pairs_of(layers, [2], [9]) == [Pair(2, 9, 2)]


@pytest.mark.parametrize(
    "rule",
    [
        SelectionRule(3, "softmax"),
        SelectionRule(3, "none", router_bias=RNG.normal(size=EXPERTS).astype(np.float32)),
        SelectionRule(3, "sigmoid", selection_bias=RNG.normal(size=EXPERTS).astype(np.float32)),
        SelectionRule(2, "sigmoid", groups=4, groups_used=2),
    ],
)
def test_slots_are_counted_as_the_rule_selects(rule: SelectionRule) -> None:
    logits = RNG.normal(size=(40, EXPERTS)).astype(np.float32)
    truth = RNG.normal(size=(40, EXPERTS)).astype(np.float32)
    ids = np.stack([rule.select(row) for row in truth])
    expected = sum(
        len(set(rule.select(row).tolist()) & set(right.tolist()))
        for row, right in zip(logits, ids, strict=True)
    )
    assert agreed(rule, logits, ids) == expected


class OneRule:
    """A ranker, as far as scoring needs one."""

    def rule(self, layer: int) -> SelectionRule:
        return SelectionRule(2, "softmax")


def test_the_candidate_that_predicts_best_is_taken_and_the_router_if_none_is_better() -> None:
    hidden = RNG.normal(size=(300, WIDTH)).astype(np.float32)
    truth = RNG.normal(size=(EXPERTS, WIDTH)).astype(np.float32)
    ids = np.stack([OneRule().rule(1).select(row) for row in hidden @ truth.T])
    for candidates, best in (([ROUTER, truth, ROUTER], truth), ([truth, ROUTER, ROUTER], None)):
        scoring = Scoring(OneRule(), [0.1, 1.0])  # type: ignore[arg-type]
        scoring.add(Pair(0, 1, 1), candidates)
        scoring.seen(0, hidden, ids)
        scoring.seen(1, hidden, ids)
        [gate] = scoring.best()
        assert gate.matrix is best and gate.agreement == 1.0
        assert (gate.stale, gate.penalty) == (1.0, None) if best is None else gate.stale < 1


def test_documents(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("One\nfile.")
    lines.write_text('{"text": "two"}\n\n{"text": "three", "more": 1}\n')
    assert read_documents([plain, lines]) == ["One\nfile.", "two", "three"]
    with pytest.raises(SettingsError, match=r"1 document.*held out"):
        read_documents([plain])
    for content, why in (("{", "line 1: not JSON"), ('{"txt": 1}', 'give an object with a "text"')):
        lines.write_text(content)
        with pytest.raises(SettingsError, match=why):
            read_documents([plain, lines])
    with pytest.raises(SettingsError, match="cannot read"):
        read_documents([tmp_path / "absent"])


def made() -> Gates:
    fitted = Gate(5, 2, ROUTER, stale=0.5, agreement=0.75, penalty=0.1)
    own = Gate(6, 2, None, stale=0.5, agreement=0.5, penalty=None)
    return Gates.of("aa", [fitted, own], fitted=10, held=4)


def test_gates_are_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "gates.safetensors"
    write_gates(path, made())
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    found = read_gates(path, "aa")
    assert (found.fitted, found.held, found.depths) == (10, 4, [2])
    np.testing.assert_array_equal(check_depth(found, 2, path)[5].matrix, ROUTER)
    assert check_depth(found, 2, path)[6] == made().gates[6, 2]
    with pytest.raises(SettingsError, match=r"depth 2, not 3.*--depth 3"):
        check_depth(found, 3, path)
    with pytest.raises(SettingsError, match="another model"):
        read_gates(path, "bb")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gates.safetensors"
    write_gates(path, made())
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for content, why in (
        (whole[:-8], "damaged"),
        (whole[:20], "damaged"),
        (b"", "damaged"),
        (bytes(flipped), "not those that were written"),
    ):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=why) as raised:
            read_gates(path, "aa")
        assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SettingsError, match="cannot read it"):
            read_gates(folder, "aa")


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "other.safetensors"
    save_file({"a": ROUTER}, path)
    with pytest.raises(SettingsError, match="not one that routeahead wrote"):
        read_gates(path, "aa")
    write_tensors(path, {"a": ROUTER}, {"format": "something else"})
    with pytest.raises(SettingsError, match="routeahead calibrate"):
        read_gates(path, "aa")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": ROUTER}, {"n": 1})
    with pytest.raises(SettingsError, match="cannot be written"):
        write_tensors(tmp_path / "absent" / "b", {"a": ROUTER}, {})
    assert read_tensors(path)[1] == {"n": 1}
    assert json.dumps([one.name for one in tmp_path.iterdir()]) == '["a.safetensors"]'
