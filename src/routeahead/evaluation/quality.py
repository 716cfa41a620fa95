"""The quality of a setting's output, compared with the baseline's: functions of arrays and text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# What must not follow an answer that ends in a word character: more of the word, a hyphen or an
# apostrophe with a word behind it ("quarante" is not "quarante-deux"), or the rest of a number
# ("19" is neither 19.5 nor 19,000).
_WORD_GOES_ON = re.compile(r"\w|[-'\u2019]\w|(?<=\d)[.,]\d")
_LOOK_AHEAD = 2
"""Characters after an answer that decide whether it ended there."""


class TokenScore(NamedTuple):
    """One graded token.

    Attributes:
        nll: negative log-likelihood of the text's own next token, in nats.
        kl: divergence of the next-token distribution from the baseline's, in nats.
        agrees: whether both give the same token the highest probability.
    """

    nll: float
    kl: float
    agrees: bool


class Divergence(NamedTuple):
    """How a greedy generation compares with the baseline's.

    Attributes:
        first: index of the first token that differs (or that only one of the two has); None if
            the two are equal.
        equal_share: share of the positions of the longer one at which both have the same token,
            0 to 1.
    """

    first: int | None
    equal_share: float


def log_softmax(logits: Logits) -> Float64:
    """Natural logarithms of the probabilities, of the shape of `logits` [..., vocabulary].

    Computed in float64, so that rounding adds nothing to a difference between logits.
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    log_sum: Float64 = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted - log_sum


def kl_divergence(baseline: Float64, other: Float64) -> Float64:
    """Kullback-Leibler divergence of `other` from `baseline`, in nats (Kullback, Leibler 1951).

    Takes log-probabilities [..., vocabulary] and returns [...]: the sum over the vocabulary of
    p (log p - log q) with p the baseline's. Equal logits give exactly 0. A sum that rounding takes
    below 0 is returned as 0.
    """
    divergence: Float64 = (np.exp(baseline) * (baseline - other)).sum(axis=-1)
    return np.maximum(divergence, 0.0)


def score_token(baseline: Logits, logits: Logits, target: int) -> TokenScore:
    """Grades the logits [vocabulary] of one position; `target` is the token that comes next."""
    reference, log_p = log_softmax(baseline), log_softmax(logits)
    return TokenScore(
        nll=float(-log_p[target]),
        kl=float(kl_divergence(reference, log_p)),
        agrees=bool(np.argmax(baseline) == np.argmax(logits)),
    )


def perplexity(nll: npt.ArrayLike) -> float:
    """exp of the mean negative log-likelihood, from values in nats [tokens]."""
    return math.exp(float(np.asarray(nll, dtype=np.float64).mean()))


def answer_matches(text: str, answer: str) -> bool:
    """Whether `text`, stripped of white space, starts with exactly `answer`.

    Case matters. If the answer ends in a word character, the word must end there too: see
    `_WORD_GOES_ON`. `answer` is stripped as well.
    """
    text, answer = text.strip(), answer.strip()
    if not text.startswith(answer):
        return False
    ends_in_word = re.search(r"\w$", answer) is not None
    return not (ends_in_word and _WORD_GOES_ON.match(text, len(answer)))


def answer_is_decided(text: str, answer: str) -> bool:
    """Whether no continuation of `text` can change the result of `answer_matches`."""
    start, answer = text.lstrip(), answer.strip()
    if not start.startswith(answer[: len(start)]):
        return True
    return len(start) >= len(answer) + _LOOK_AHEAD


def divergence(baseline: Sequence[int], tokens: Sequence[int]) -> Divergence:
    """Compares two greedy generations token by token; two empty ones are equal."""
    longer = max(len(baseline), len(tokens))
    equal = [a == b for a, b in zip(baseline, tokens, strict=False)]
    equal += [False] * (longer - len(equal))
    first = equal.index(False) if False in equal else None
    return Divergence(first, sum(equal) / longer if longer else 1.0)


def kl_summary(kl: npt.ArrayLike) -> dict[str, Any]:
    """Mean, median and 99th percentile (linear interpolation) of divergences [tokens], in nats."""
    values = np.asarray(kl, dtype=np.float64)
    return {
        "kl_mean": float(values.mean()),
        "kl_median": float(np.median(values)),
        "kl_p99": float(np.percentile(values, 99)),
    }
