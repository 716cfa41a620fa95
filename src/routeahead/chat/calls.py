"""Calls of tools as models write them, read."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Call = tuple[str, str]
"""A function's name and its arguments, JSON."""

# DeepSeek (with and without a kind and a block of code), Kimi, Mistral: a name, and an object.
_NAMED = re.compile(
    r"(?:function<｜tool▁sep｜>|functions\.)?(?P<name>[\w.-]{1,128}?)(?::\d+)?"
    r"(?:\[CALL_ID\]\w{0,64})?(?:<｜tool▁sep｜>|<\|tool_call_argument_begin\|>|\[ARGS\])?\s*"
    r"(?:```json\s*)?(?P<arguments>\{.*\})\s*(?:```)?",
    re.DOTALL,
)
# Qwen3-Coder, Nemotron and Step.
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_FUNCTION_VALUE = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
# GLM and Ling: the name comes first.
_PAIRS_NAME = re.compile(r"[\w.-]+")
_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
# MiniMax and DeepSeek 3.2: its second attribute says whether the value is a text.
_INVOKE = re.compile(r'<invoke name="([^"]+)">(.*?)</invoke>', re.DOTALL)
_INVOKE_VALUE = re.compile(
    r'<parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</parameter>', re.DOTALL
)
_PYTHON = re.compile(r"([\w.]+)\.call\(.*\)", re.DOTALL)


def read_calls(text: str, tools: Sequence[Any] = ()) -> list[Call]:
    """The calls in what a model wrote as some; none if it is not understood.

    Args:
        tools: in the form of OpenAI's API. Where a form writes all arguments as bare text, their
            schemas tell texts from numbers.
    """
    text = text.strip().replace("｜DSML｜", "")
    try:
        if text.startswith(("{", "[")):
            return list(_of_json(text))
        return _of_tags(text, tools) or _of_name(text) or _of_pairs(text, tools) or _of_python(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SyntaxError):
        return []


def _of_json(text: str) -> Iterator[Call]:
    """One object, a list of them, or several behind each other."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        for one in found if isinstance(found, list) else [found]:
            function = one.get("function", one)
            name = function["name"]
            arguments = function.get("arguments", function.get("parameters", {}))
            if not isinstance(name, str):
                raise ValueError
            written = isinstance(arguments, str)
            yield name, arguments if written else json.dumps(arguments, ensure_ascii=False)
        while at < len(text) and text[at] in "; ,\n\t\r":
            at += 1


def _of_name(text: str) -> list[Call]:
    named = _NAMED.fullmatch(text)
    if not named:
        return []
    json.loads(named["arguments"])
    return [(named["name"], named["arguments"])]


def _of_pairs(text: str, tools: Sequence[Any]) -> list[Call]:
    """A name and pairs; a name alone is a call if a tool is called so."""
    name = text.partition("<arg_key>")[0].strip()
    pairs = _PAIR.findall(text)
    known = bool(pairs) or any(tool["function"]["name"] == name for tool in tools)
    return [_call(name, pairs, tools)] if known and _PAIRS_NAME.fullmatch(name) else []


def _of_tags(text: str, tools: Sequence[Any]) -> list[Call]:
    functions, invoked = _FUNCTION.findall(text), _INVOKE.findall(text)
    return [
        *(_call(name, _FUNCTION_VALUE.findall(body), tools) for name, body in functions),
        *(_invoked(name, body, tools) for name, body in invoked),
    ]


def _call(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Any]) -> Call:
    kinds = _kinds(name, tools)
    values = {key: _value(_unwrapped(text), kinds.get(key)) for key, text in pairs}
    return name, json.dumps(values, ensure_ascii=False)


def _unwrapped(text: str) -> str:
    """Without the line ends that may stand around a value."""
    return text.removeprefix("\n").removesuffix("\n")


def _invoked(name: str, body: str, tools: Sequence[Any]) -> Call:
    kinds = _kinds(name, tools)
    values = {
        key: _value(text, "string" if is_text == "true" else kinds.get(key))
        for key, is_text, text in _INVOKE_VALUE.findall(body)
    }
    return name, json.dumps(values, ensure_ascii=False)


def _kinds(name: str, tools: Sequence[Any]) -> Mapping[str, Any]:
    """Argument → its type in the schema, of those that have one."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _of_python(text: str) -> list[Call]:
    """Llama 3's call of a tool that is built into it, such as `brave_search.call(query="x")`."""
    if not _PYTHON.fullmatch(text):
        return []
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return []
    values = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    return [(ast.unparse(call.func.value), json.dumps(values, ensure_ascii=False))]
