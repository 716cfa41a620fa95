"""Tools: how a model is told of them, and how a call that the client demands is held to its schema.

What a model writes when it chooses to call one: `forms` and `calls`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama_grammar import json_schema_to_gbnf

from routeahead.chat.forms import CALL_END, CALL_START
from routeahead.errors import SettingsError

# A schema that asks for more repetitions makes a grammar of as many rules, and a slow one.
MAX_REPEAT = 1000
MAX_GRAMMAR = 1 << 20  # characters
# The converter's rule for a character of a string admits line ends, which JSON does not.
_ANY_CHARACTER, _JSON_CHARACTER = 'char ::= [^"\\\\] |', 'char ::= [^"\\\\\\x7F\\x00-\\x1F] |'
_TOO_DEEP = "schema: it is nested too deeply"
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")


def describe(tools: Sequence[Any]) -> str:
    """A system message's text that tells a model of tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call these functions:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f'To call one, answer with {CALL_START}{{"name": NAME, "arguments": OBJECT}}{CALL_END}.'
    )


def as_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call, the latter as an object if they are one."""
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else a template gets what the client had sent
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def schema_of_calls(tools: Sequence[Any]) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools.

    Raises:
        SettingsError: the schema of one is nested too deeply.
    """
    try:
        calls = {f"call{index}": _schema(tool, index) for index, tool in enumerate(tools)}
    except RecursionError:
        raise SettingsError(_TOO_DEEP) from None
    return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in calls], "$defs": calls}


def _schema(tool: Any, index: int) -> dict[str, Any]:
    arguments = tool["function"].get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool["function"]["name"]},
            "arguments": _moved(arguments, f"#/$defs/call{index}/properties/arguments"),
        },
        "required": ["name", "arguments"],
    }


def _moved(node: Any, root: str) -> Any:
    """A schema whose references to its own parts begin at `root`, where it is put."""
    if isinstance(node, Mapping):
        moved = {key: _moved(value, root) for key, value in node.items()}
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    if isinstance(node, list):
        return [_moved(value, root) for value in node]
    return node


def grammar_of(schema: Mapping[str, Any]) -> str:
    """The grammar (GBNF) that admits what a JSON schema admits.

    Raises:
        SettingsError: the schema is malformed, too large, or uses what grammars cannot say.
    """
    try:
        _check_counts(schema)
        text: str = json_schema_to_gbnf(json.dumps(schema))
    except SettingsError:
        raise
    except RecursionError:
        raise SettingsError(_TOO_DEEP) from None
    except Exception as error:  # the converter asserts and raises all kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(f"schema: cannot be made a grammar: {reason}") from error
    text = text.replace(_ANY_CHARACTER, _JSON_CHARACTER)
    if len(text) > MAX_GRAMMAR:
        raise SettingsError("schema: it is too large for a grammar")
    return text


def check_grammar(grammar: str, model: Any) -> None:
    """Has llama.cpp parse it: a sampler without a grammar ends the process.

    Raises:
        SettingsError: llama.cpp refuses the grammar.
    """
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
    if not sampler:
        raise SettingsError("schema: llama.cpp refuses the grammar made of it")
    llama_cpp.llama_sampler_free(sampler)


def _check_counts(node: Any) -> None:
    if isinstance(node, Mapping):
        for key in _COUNTS:
            if isinstance(node.get(key), int) and node[key] > MAX_REPEAT:
                raise SettingsError(f"schema: {key} is {node[key]}: give at most {MAX_REPEAT}")
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            counts = re.findall(r"\d+", " ".join(re.findall(r"\{[^}]*\}", pattern)))
            if any(int(count) > MAX_REPEAT for count in counts):
                raise SettingsError(f"schema: a pattern repeats more than {MAX_REPEAT} times")
        for value in node.values():
            _check_counts(value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for value in node:
            _check_counts(value)
