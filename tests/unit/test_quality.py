"""Scoring, checked against its definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from routeahead.evaluation import quality

RANDOM = np.random.default_rng(0)


def random_logits(*shape: int, scale: float = 4.0) -> quality.Logits:
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


def test_log_softmax_of_known_probabilities() -> None:
    probabilities = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    shift = np.array([[3.0], [-40.0]])
    logits = (np.log(probabilities) + shift).astype(np.float32)
    np.testing.assert_allclose(np.exp(quality.log_softmax(logits)), probabilities, rtol=1e-5)


def test_log_softmax_survives_large_logits() -> None:
    row = np.array([1e4, 0.0, -1e4], np.float32)
    np.testing.assert_array_equal(quality.log_softmax(row), [0.0, -1e4, -2e4])


def test_kl_divergence_by_its_definition() -> None:
    first, second = random_logits(300), random_logits(300)
    p, q = (np.exp(row.astype(float)) / np.exp(row.astype(float)).sum() for row in (first, second))
    by_definition = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    logs = quality.log_softmax(np.stack([first, second]))
    assert quality.kl_divergence(logs[0], logs[1]) == pytest.approx(by_definition, rel=1e-12)
    assert quality.kl_divergence(logs[0], logs[1]) != quality.kl_divergence(logs[1], logs[0])


def test_kl_divergence_takes_many_rows() -> None:
    logs = quality.log_softmax(random_logits(2, 5, 40))
    together = quality.kl_divergence(logs[0], logs[1])
    assert together.shape == (5,)
    assert [float(quality.kl_divergence(a, b)) for a, b in zip(*logs, strict=True)] == list(
        together
    )


def test_equal_logits_diverge_by_exactly_nothing_and_others_do_not() -> None:
    row = random_logits(5000)
    assert quality.score_token(row, row.copy(), 17).kl == 0.0
    changed = row.copy()
    changed[17] += np.float32(1e-3)
    assert quality.score_token(row, changed, 17).kl > 0.0


def test_score_token() -> None:
    baseline = np.log(np.array([0.7, 0.2, 0.1], np.float32))
    other = np.log(np.array([0.3, 0.6, 0.1], np.float32))
    score = quality.score_token(baseline, other, 2)
    assert score.nll == pytest.approx(-math.log(0.1), rel=1e-6)
    assert score.kl == pytest.approx(0.7 * math.log(7 / 3) + 0.2 * math.log(1 / 3), rel=1e-6)
    assert not score.agrees
    assert quality.score_token(baseline, baseline + 5, 0).agrees


def test_perplexity_of_a_fair_die_is_its_sides() -> None:
    assert quality.perplexity([math.log(6)] * 10) == pytest.approx(6)
    assert quality.perplexity([math.log(2), math.log(8)]) == pytest.approx(4)


def test_kl_summary() -> None:
    figures = quality.kl_summary([float(value) for value in range(101)])
    assert figures == {"kl_mean": 50.0, "kl_median": 50.0, "kl_p99": 99.0}


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Paris", "Paris", True),
        ("\n Paris.\nQuestion", "Paris", True),
        ("Paris", " Paris\n", True),
        ("Paris, France", "Paris", True),
        ("It is Paris", "Paris", False),
        ("paris", "Paris", False),
        ("Parisian", "Paris", False),
        ("Pari", "Paris", False),
        ("Paris's", "Paris", False),
        ("quarante-deux", "quarante", False),
        ("quarante-deux", "quarante-deux", True),
        ("quarante - deux", "quarante", True),
        ("19", "19", True),
        ("19.", "19", True),
        ("19.\nNext", "19", True),
        ("19.5", "19", False),
        ("19,000", "19", False),
        ("19, 20", "19", True),
        ("190", "19", False),
        ("one.5", "one", True),
        ("f(a):\n    return a + 3\n", "f(a):\n    return a + 3", True),
        ("f(a):\n    return a + 31", "f(a):\n    return a + 3", False),
        ("(x)y", "(x)", True),
        ("", "Paris", False),
    ],
)
def test_answer_matches(text: str, answer: str, right: bool) -> None:
    assert quality.answer_matches(text, answer) is right


def test_a_decided_answer_stays_as_it_is() -> None:
    """Over all short texts: once decided, no continuation changes the verdict; and a text that
    goes on for long enough is decided."""
    alphabet, answers = "a1.- ", ("a", "a1", "1", "-", "1.")
    texts = [""]
    for _ in range(5):
        texts += [text + more for text in texts for more in alphabet if len(text) < 5]
    texts = list(dict.fromkeys(texts))
    undecided = 0
    for answer in answers:
        for text in texts:
            verdict = quality.answer_matches(text, answer)
            for cut in range(len(text)):
                if quality.answer_is_decided(text[:cut], answer):
                    assert quality.answer_matches(text[:cut], answer) is verdict, (
                        text,
                        cut,
                        answer,
                    )
                elif text.strip():
                    undecided += 1
            if len(text.lstrip()) == 5:
                assert quality.answer_is_decided(text, answer)
    assert undecided


@pytest.mark.parametrize(
    ("baseline", "tokens", "first", "share"),
    [
        ([1, 2, 3], [1, 2, 3], None, 1.0),
        ([1, 2, 3, 4], [1, 9, 3, 4], 1, 0.75),
        ([1, 2, 3, 4], [1, 2], 2, 0.5),
        ([1], [1, 2], 1, 0.5),
        ([], [7], 0, 0.0),
        ([], [], None, 1.0),
    ],
)
def test_divergence(
    baseline: list[int], tokens: list[int], first: int | None, share: float
) -> None:
    assert quality.divergence(baseline, tokens) == (first, share)
