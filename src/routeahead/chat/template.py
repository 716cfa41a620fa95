"""A model's chat template: messages and tools become the tokens of a prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp.llama_chat_format import CHATML_CHAT_TEMPLATE, Jinja2ChatFormatter

from routeahead.chat.channels import Channels
from routeahead.chat.forms import CALL_END, CALL_START, form_of
from routeahead.chat.segments import Parts, Segments
from routeahead.chat.tools import as_call, describe
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it.

    Attributes:
        tokens: ids.
        thinking: the prompt ends inside a block of reasoning, so the answer begins there.
    """

    tokens: list[int]
    thinking: bool


class ChatTemplate:
    """The template in the model's metadata; ChatML if it has none.

    Attributes:
        form: how its models write reasoning and calls.
    """

    def __init__(self, llm: Llama) -> None:
        text = llm.metadata.get("tokenizer.chat_template") or CHATML_CHAT_TEMPLATE
        self.form = form_of(text)
        self._knows_tools = "tools" in text
        self._short_ids = _SHORT_ID.search(text) is not None
        self._llm = llm
        self._format = Jinja2ChatFormatter(
            template=text,
            eos_token=_text_of(llm, llm.token_eos()),
            bos_token=_text_of(llm, llm.token_bos()),
        )

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] | None = None,
        errors: str = "strict",
    ) -> Prompt:
        """The prompt that asks for the next answer.

        Args:
            messages: as OpenAI's API has them, with texts as content.
            tools: functions that the model may call, in the same API's form.
            variables: of the template, such as `enable_thinking`.
            errors: what to do with texts that are no Unicode, as in `str.encode`.

        Raises:
            SettingsError: the template refuses the messages, or they are no Unicode.
        """
        plain = not self._knows_tools
        if tools and plain:
            messages = _with_system(messages, describe(tools))
        prepared = [_written_out(m) if plain else self._for_template(m) for m in messages]
        given = {"tools": list(tools)} if tools and not plain else {}
        given |= variables or {}
        try:
            text = self._rendered(prepared, given)
            data = text.encode("utf-8", errors)
        except UnicodeEncodeError:
            raise SettingsError("messages: a text holds half of a surrogate pair") from None
        except Exception as error:  # whatever a template raises about messages that it refuses
            reason = " ".join(str(error).split())
            raise SettingsError(
                f"messages: the model's chat template refuses them: {reason}"
            ) from error
        tokens = self._llm.tokenize(data, add_bos=False, special=True)
        begin = self.form.reasoning[0] if self.form.reasoning else None
        return Prompt(tokens, thinking=bool(begin) and text.rstrip().endswith(begin or ""))

    def _rendered(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
        """Most templates write the arguments of calls as JSON themselves; some, as DeepSeek's,
        take them as text."""
        try:
            return str(self._format(messages=messages, **given).prompt)  # type: ignore[arg-type]
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            written = [_with_written_arguments(message) for message in messages]
            return str(self._format(messages=written, **given).prompt)  # type: ignore[arg-type]

    def parts(self, *, reasoning: bool = True, calls: bool, thinking: bool) -> Parts:
        """What splits an answer; the arguments are those of `Segments`."""
        if self.form.channels and (reasoning or calls):
            return Channels()
        return Segments(self.form, reasoning=reasoning, calls=calls, thinking=thinking)

    def shown(self, *, calls: bool) -> frozenset[int]:
        """Control tokens that are markers of the form: their text is needed to tell parts apart."""
        found = set()
        for marker in self.form.markers(calls=calls):
            ids = self._llm.tokenize(marker.encode(), add_bos=False, special=True)
            if len(ids) == 1:
                found.update(ids)
        return frozenset(found)

    def _for_template(self, message: Message) -> dict[str, Any]:
        """Arguments of calls as objects."""
        made = {**message, "content": message.get("content") or ""}
        if message.get("tool_calls"):
            made["tool_calls"] = [
                {**call, "function": as_call(call["function"])} for call in message["tool_calls"]
            ]
        if self._short_ids:
            for one in (made, *made.get("tool_calls", ())):
                for name in ("id", "tool_call_id"):
                    if isinstance(one.get(name), str):
                        one[name] = hashlib.sha256(one[name].encode()).hexdigest()[:9]
        return made


# Mistral's refuse calls whose ids have another length.
_SHORT_ID = re.compile(r"length\s*!=\s*9")


def _with_written_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of calls as JSON text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _text_of(llm: Llama, token: int) -> str:
    if token < 0:
        return ""
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    text: bytes = llama_cpp.llama_vocab_get_text(vocabulary, token)
    return text.decode("utf-8", "replace")


def _written_out(message: Message) -> dict[str, Any]:
    """Calls and their results as text, for a template that knows neither."""
    content = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        written = json.dumps(as_call(call["function"]), ensure_ascii=False)
        content += f"\n{CALL_START}\n{written}\n{CALL_END}"
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{content}\n</tool_response>",
        }
    return {"role": message["role"], "content": content.lstrip("\n")}


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with `text` at the end of the first system message."""
    first = messages[0] if messages else None
    if first and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
