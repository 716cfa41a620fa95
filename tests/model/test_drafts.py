"""What drafts are taken, and which prompt lookup makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from support.library import PROMPTS
from support.speculation import Ids, text

from routeahead import Llama, SettingsError, UseError
from routeahead.engine.speculation import PromptLookup

Load = Callable[..., Llama]

PROMPT = PROMPTS[0][0]


class Answer(LlamaDraftModel):
    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Any:
        return self._draft


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (np.array([1, 100_000], np.intc), "draft_model drafted token 100000, and there are 259"),
        (np.array([-1], np.intc), "drafted token -1"),
        (np.array([0.5]), "draft_model made float64"),
        (np.array([[1, 2]]), r"made int64 \(1, 2\) of a draft: give token ids"),
    ],
)
def test_drafts_that_are_none(load: Load, draft: Any, message: str) -> None:
    llm = load("qwen3moe", cache_mb=8, draft_model=Answer(draft))
    with pytest.raises(SettingsError, match=message):
        text(llm, PROMPT, 4, temp=0.0)
    llm.draft_model = None
    assert len(text(llm, PROMPT, 4, temp=0.0)) == 4


def test_settings_that_do_not_go_together(load: Load) -> None:
    with pytest.raises(SettingsError, match="lookup and draft_model both make drafts"):
        load("qwen3moe", cache_mb=8, lookup=4, draft_model=LlamaPromptLookupDecoding())
    with pytest.raises(SettingsError, match="lookup is -1"):
        load("qwen3moe", cache_mb=8, lookup=-1)


def test_more_than_a_batch_is_not_verified(load: Load) -> None:
    """Tokens that a consumer sends are verified like drafts."""
    llm = load("qwen3moe", cache_mb=8)
    steps = llm.generate(PROMPT, temp=0.0)
    plain = [next(steps) for _ in range(6)]
    steps.close()
    llm.reset()
    steps = llm.generate(PROMPT, temp=0.0)
    assert [next(steps), steps.send(plain[1:4]), *(next(steps) for _ in range(4))] == plain
    assert llm.counters.decode.accepted == 3
    with pytest.raises(UseError, match="are to be verified, and a batch has 256"):
        steps.send([3] * 300)


# --- prompt lookup ---


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 9, 2, 2], []),  # one equal token is not enough
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2, 4, 9]),  # the last time
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2, 4, 7]),  # the longest
        ([5, 5, 5], [5, 5, 5, 5]),  # what repeats itself goes on
    ],
)
def test_prompt_lookup(text: list[int], draft: list[int]) -> None:
    assert PromptLookup(8)(np.array(text, np.intc)).tolist() == draft


def test_a_draft_is_no_longer_than_asked() -> None:
    text = np.array([*range(20), *range(10)], np.intc)
    assert PromptLookup(8)(text).tolist() == [*range(10, 18)]
    assert PromptLookup(1)(text).tolist() == [10]
    assert PromptLookup(64)(text).tolist() == [*range(10, 20), *range(10)]
