"""The answers of gpt-oss: messages with a header that says which channel and for whom.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

(Source: OpenAI's "harmony response format".) The prompt ends after `<|start|>assistant`, so an
answer begins within a header. What ends an answer is no text, so its last message has no end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from routeahead.chat.forms import CHANNEL_MARKERS
from routeahead.chat.segments import Kind, Segment, withheld

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Channels:
    """Splits such an answer into segments (`segments.Parts`)."""

    def __init__(self) -> None:
        self._pending = ""
        self._header: str | None = ""  # what of it has arrived; None within a message
        self._kind: Kind = "text"
        self._recipient = ""

    def feed(self, text: str) -> Iterator[Segment]:
        self._pending += text
        while True:
            ends = _ENDS if self._header is None else (_MESSAGE,)
            found = [(at, m) for m in ends if (at := self._pending.find(m)) >= 0]
            if not found:
                break
            at, marker = min(found)
            before, self._pending = self._pending[:at], self._pending[at + len(marker) :]
            if marker == _MESSAGE:
                self._begin(before)
            else:
                yield from self._give(before)
                self._header = ""
        if self._header is None and self._kind != "call":
            keep = withheld(self._pending, ends)
            ready = self._pending[: len(self._pending) - keep]
            self._pending = self._pending[len(ready) :]
            yield from self._give(ready)

    def close(self) -> Iterator[Segment]:
        if self._header is not None:  # a model that writes no headers
            self._kind = "text"
            if any(marker in self._pending for marker in CHANNEL_MARKERS):
                self._pending = ""
        yield from self._give(self._pending)
        self._pending = ""

    def _begin(self, header: str) -> None:
        """A message begins: the last header's channel and recipient say what it is."""
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        self._header, self._recipient = None, recipient[1] if recipient else ""
        if recipient:
            self._kind = "call"
        else:
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "text"

    def _give(self, text: str) -> Iterator[Segment]:
        if self._kind == "call":
            yield self._called(text.strip())
        elif text:
            yield Segment(self._kind, text)

    def _called(self, arguments: str) -> Segment:
        """A call in Hermes' form; one that was cut off is text."""
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return Segment("text", arguments)
        call = {"name": self._recipient, "arguments": given}
        return Segment("call", json.dumps(call, ensure_ascii=False))
