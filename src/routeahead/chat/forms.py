"""How models write reasoning and calls of tools: told by the markers that their chat template has.

The forms are those of the templates that the models are published with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
HERMES = {CALL_START: CALL_END}
"""Hermes, Qwen, Granite, GLM, Nemotron, Step: what is between them differs (`calls.read_calls`)."""

# Start → end of a call. Without an end, the next start or the answer's end is it.
_CALLS = HERMES | {
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>",  # DeepSeek to 3.1
    "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",  # DeepSeek 3.2
    "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",  # DeepSeek 4
    "<|tool_call_begin|>": "<|tool_call_end|>",  # Kimi
    "<minimax:tool_call>": "</minimax:tool_call>",  # MiniMax
    "[TOOL_CALLS]": "",  # Mistral
    "<|python_tag|>": "",  # Llama 3
}
# Around several calls.
_SILENT = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Llama 3 is told to answer with a call and nothing else.
_BARE = '"parameters": dictionary of argument name'
_CHANNEL = "<|channel|>"
CHANNEL_MARKERS = ("<|start|>", _CHANNEL, "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")


@dataclass(frozen=True)
class Form:
    """What the markers of a template mean in an answer.

    Attributes:
        reasoning: what begins and ends reasoning; None if the template knows none.
        calls: what begins a call → what ends it; "" if the next one or the answer's end does.
        silent: what may stand around calls.
        bare: an answer that begins with { is a call.
        channels: the answer is messages with headers, as gpt-oss writes (`channels.Channels`).
    """

    reasoning: tuple[str, str] | None = None
    calls: Mapping[str, str] = field(default_factory=lambda: HERMES)
    silent: tuple[str, ...] = ()
    bare: bool = False
    channels: bool = False

    def markers(self, *, calls: bool) -> tuple[str, ...]:
        """What has to be seen in an answer, also where the vocabulary has it as a control token."""
        if self.channels:
            return CHANNEL_MARKERS
        found = self.reasoning or ()
        return (*found, *self.calls, *self.calls.values(), *self.silent) if calls else found


def form_of(template: str) -> Form:
    """The form of a chat template's models.

    One that knows no tools, or has no marker that is known here, is told to write Hermes' form.
    """
    if _CHANNEL in template and "<|message|>" in template:
        return Form(channels=True)
    # Some strip the beginning from earlier turns and never write it.
    reasoning = next((pair for pair in _REASONING if pair[1] in template), None)
    calls = {start: end for start, end in _CALLS.items() if start in template}
    bare = _BARE in template
    return Form(
        reasoning,
        calls or ({"<|python_tag|>": ""} if bare else HERMES),
        tuple(marker for marker in _SILENT if marker in template),
        bare,
    )
