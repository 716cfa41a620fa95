"""The parts of an answer, however it is cut into pieces, in each form that models write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routeahead.chat.calls import read_calls
from routeahead.chat.channels import Channels
from routeahead.chat.forms import Form, form_of
from routeahead.chat.segments import Parts, Segments, withheld

CALL = '{"name": "f", "arguments": {"a": "<think>"}}'
THINKING = Form(("<think>", "</think>"))
SIZES = (1, 2, 3, 7, 1000)


def cut(text: str, size: int, parts: Parts) -> list[tuple[str, str]]:
    """Kind and text of each part, the pieces of one joined."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found: list[tuple[str, str]] = []
    for piece in (*(s for p in pieces for s in parts.feed(p)), *parts.close()):
        if found and found[-1][0] == piece.kind != "call":
            found[-1] = piece.kind, found[-1][1] + piece.text
        else:
            found.append((piece.kind, piece.text))
    return found


def parts(text: str, size: int, form: Form = THINKING, **known: bool) -> list[tuple[str, str]]:
    return cut(text, size, Segments(form, **{"reasoning": True, "calls": True, **known}))


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_told_apart(size: int) -> None:
    text = f"<think>\nhm </th> <tool_call>\n</think>\n\nYes <b>.\n<tool_call>\n{CALL}\n</tool_call>"
    assert parts(text, size) == [
        ("reasoning", "hm </th> <tool_call>\n"),
        ("text", "Yes <b>.\n"),
        ("call", CALL),
    ]
    two = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
    assert parts(two, size) == [("call", CALL), ("call", CALL)]
    assert parts("a</think>b", size, thinking=True) == [("reasoning", "a"), ("text", "b")]
    assert parts(text, size, reasoning=False, calls=False) == [("text", text)]
    assert parts("x <thin", size) == [("text", "x <thin")]
    assert parts("<tool_call>{", size) == [("text", "<tool_call>{")]  # cut off: no call


def test_no_text_is_withheld_without_need() -> None:
    assert withheld("abc<thi", ["<think>"]) == 4
    assert withheld("abc<think>", ["<think>"]) == 0
    assert withheld("aab", ["aabaaa", "b!"]) == 3
    assert withheld("abc", []) == 0


def test_what_is_a_call() -> None:
    assert read_calls('{"name": "f", "arguments": {"a": 1}}') == [("f", '{"a": 1}')]
    assert read_calls('{"name": "f"}') == [("f", "{}")]
    for text in ("", "[]", "{}", '{"name": 1}', "[" * 10**5, "null", '"name"', "f", "f{", "f{1}"):
        assert read_calls(text) == []


# --- the forms of the models' own templates ---

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "zip": {"type": "string"},
                },
            },
        },
    }
]
PARIS = {"city": "Paris", "days": 2}
ARGUMENTS = json.dumps(PARIS)
OBJECT = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
XML = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>"
)
GLM = (
    "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
)
MINIMAX = (
    '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>'
)
DSML = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
LLAMA_SAYS = '{"name": function name, "parameters": dictionary of argument name and its value}.'
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, DONE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI = (
    "<|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
)
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"
MISTRAL = f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"

# Name → what of the template tells the form, what its model writes, how often it calls.
FORMS: dict[str, tuple[str, str, int]] = {
    "hermes": ("<tool_call>", HERMES, 1),
    "qwen3": ("<think></think><tool_call>", f"<think>\nHm.\n</think>\n\n{HERMES}", 1),
    "two": ("<tool_call>", f"{HERMES}\n{HERMES}", 2),
    "qwen3-coder": ("<tool_call>", f"<tool_call>\n{XML}\n</tool_call>", 1),
    "glm": ("<tool_call>", f"<tool_call>{GLM}</tool_call>", 1),
    "glm 4.7": ("<tool_call>", f"<tool_call>{GLM.replace(chr(10), '')}</tool_call>", 1),
    "minimax": (
        "<minimax:tool_call>",
        f"<minimax:tool_call>\n{MINIMAX}\n{MINIMAX}\n</minimax:tool_call>",
        2,
    ),
    "llama 3": (LLAMA_SAYS, LLAMA, 1),
    "llama 3, two": (LLAMA_SAYS, f"{LLAMA}; {LLAMA}", 2),
    "llama 3, python tag": (f"<|python_tag|>{LLAMA_SAYS}", f"<|python_tag|>{LLAMA}", 1),
    "llama 3, built in": (
        f"<|python_tag|>{LLAMA_SAYS}", '<|python_tag|>get_weather.call(city="Paris", days=2)', 1,
    ),
    "mistral nemo": (
        "[TOOL_CALLS]", f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcdefghi"}}, {OBJECT}]', 2,
    ),
    "mistral small": ("[TOOL_CALLS]", MISTRAL.replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]"), 1),
    "mistral, two": ("[TOOL_CALLS][THINK][/THINK]", f"[THINK]Hm.[/THINK]{MISTRAL}{MISTRAL}", 2),
    "deepseek r1": (
        ALL + DONE + BEGIN,
        f"{ALL}{BEGIN}function{SEP}get_weather\n```json\n{ARGUMENTS}\n```{END}\n"
        f"{BEGIN}function{SEP}get_weather\n```json\n{ARGUMENTS}\n```{END}{DONE}",
        2,
    ),
    "deepseek v3.1": (ALL + DONE + BEGIN, f"{ALL}{BEGIN}get_weather{SEP}{ARGUMENTS}{END}{DONE}", 1),
    "deepseek v3.2": (
        "<｜DSML｜function_calls>",
        f"<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>",
        1,
    ),
    "deepseek v4": (
        "<｜DSML｜tool_calls>", f"<｜DSML｜tool_calls>\n{DSML}\n{DSML}\n</｜DSML｜tool_calls>", 2,
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_calls_section_end|><|tool_call_begin|>",
        f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>",
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_calls_of_each_form(name: str, size: int) -> None:
    template, answer, count = FORMS[name]
    found = parts(answer, size, form_of(template))
    calls = [call for kind, text in found if kind == "call" for call in read_calls(text, TOOLS)]
    assert [(made, json.loads(arguments)) for made, arguments in calls] == [
        ("get_weather", PARIS)
    ] * count
    assert not "".join(text for kind, text in found if kind == "text").strip()
    reasoned = [text.strip() for kind, text in found if kind == "reasoning"]
    assert reasoned == (["Hm."] if "Hm." in answer else [])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_text_before_a_call_stays_text(name: str, size: int) -> None:
    template, answer, _ = FORMS[name]
    form = form_of(template)
    found = parts(f"I look. {answer}", size, form)
    assert found[0][0] == "text" and found[0][1].startswith("I look.")
    if not form.bare or "python" in answer:  # of Llama 3, a call is the whole answer
        assert any(kind == "call" for kind, _ in found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_was_cut_off_is_none(name: str, size: int) -> None:
    template, answer, count = FORMS[name]
    first = answer[: answer.index("2") + 1]  # within the arguments of the first
    found = parts(first, size, form_of(template))
    assert count and not [c for k, text in found if k == "call" for c in read_calls(text, TOOLS)]


def test_bare_text_is_of_the_type_that_the_schema_says() -> None:
    text = "get_weather<arg_key>zip</arg_key><arg_value>10115</arg_value>"
    assert read_calls(text, TOOLS) == [("get_weather", '{"zip": "10115"}')]
    assert read_calls(text) == [("get_weather", '{"zip": 10115}')]
    # A tool without arguments.
    assert read_calls("get_weather\n", TOOLS) == [("get_weather", "{}")]
    lines = "<function=f>\n<parameter=code>\n\n  a\n\n</parameter>\n</function>"
    assert read_calls(lines) == [("f", json.dumps({"code": "\n  a\n"}))]


@pytest.mark.parametrize("size", SIZES)
def test_an_object_that_calls_nothing_is_text(size: int) -> None:
    form = form_of(LLAMA_SAYS)
    [(kind, text)] = parts('  {"answer": 42}', size, form)
    assert kind == "call" and read_calls(text) == []  # the turn gives it as text then
    assert parts('{"a": 1}', size, form, calls=False) == [("text", '{"a": 1}')]
    assert parts('\n see {"a": 1}', size, form) == [("text", ' see {"a": 1}')]


HARMONY: dict[str, tuple[str, list[Any]]] = {
    "all": (
        "<|channel|>analysis<|message|>Let me <b>.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
        [("reasoning", "Let me <b>."), ("text", "I look."), ("call", OBJECT)],
    ),
    "recipient first": (
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        [("call", OBJECT)],
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        [("call", '{"name": "now", "arguments": {}}')],
    ),
    "final": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4",
        [("reasoning", "Hm."), ("text", "4")],
    ),
    "cut off": (
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Pa',
        [("text", '{"city": "Pa')],
    ),
    "cut off in a header": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assi",
        [("reasoning", "Hm.")],
    ),
    "no header": ("Just text", [("text", "Just text")]),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", HARMONY)
def test_channels(name: str, size: int) -> None:
    text, expected = HARMONY[name]
    assert form_of("<|start|>system<|message|> <|channel|>").channels
    assert cut(text, size, Channels()) == expected
