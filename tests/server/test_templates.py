"""Chat templates that want messages in their own way, and markers that are control tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from routeahead import Llama
from routeahead.chat.forms import Form
from routeahead.chat.generation import Ask, Generation, Sampling
from routeahead.chat.template import ChatTemplate
from routeahead.models import DEFAULT_MODEL

IM_START = 1  # a control token of the embedded model
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Q"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "R"},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    llm = Llama(DEFAULT_MODEL, n_ctx=256, n_threads=1, cache_mb=2)
    yield llm
    llm.close()


def rendered(llm: Llama, template: str) -> str:
    """The prompt that a template of this text makes of `CALLED`."""
    llm.metadata["tokenizer.chat_template"] = template + "{# tools #}"
    tokens = ChatTemplate(llm).prompt(CALLED).tokens
    return llm.detokenize(tokens, special=True).decode()


def test_arguments_are_objects_or_text_as_a_template_wants(llm: Llama) -> None:
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    for written in ("c.function.arguments | tojson", "'' + c.function.arguments"):
        text = rendered(llm, loop + "{{ " + written + " }}{% endfor %}{% endfor %}")
        assert text.strip() == '{"a": 1}'


def test_ids_are_as_short_as_mistral_wants_and_still_agree(llm: Llama) -> None:
    ids = (
        "{% for m in messages %}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('9') }}{% endif %}{{ c.id }} {% endfor %}"
        "{% endfor %}"
    )
    first, second = rendered(llm, ids).split()
    assert first == second and len(first) == 9


def test_a_marker_is_text_although_it_is_a_control_token(llm: Llama) -> None:
    template = ChatTemplate(llm)
    template.form = Form(calls={"<|im_start|>": ""})
    shown = template.shown(calls=True)
    assert shown == {IM_START} and not template.shown(calls=False)
    prompt = llm.tokenize(b"Q", add_bos=False)
    drawn = Sampling(temperature=0, logit_bias={IM_START: 1e4})
    for given, text in ((shown, "<|im_start|>" * 2), (frozenset[int](), "")):
        pieces = Generation(llm, Ask(prompt, drawn, limit=2, shown=given)).pieces()
        assert "".join(piece.text for piece in pieces) == text
