"""The parts of an answer, told apart while it arrives: reasoning, text, tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from routeahead.chat.forms import Form

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True)
class Segment:
    """A piece of one part. A call's text arrives whole, others as they are written."""

    kind: Kind
    text: str


class Parts(Protocol):
    """Splits an answer."""

    def feed(self, text: str) -> Iterator[Segment]:
        """The segments that `text` completes or continues."""
        ...

    def close(self) -> Iterator[Segment]:
        """What is left when the answer has ended."""
        ...


def withheld(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class Segments:
    """Splits an answer at the markers of reasoning and of calls (`Parts`)."""

    def __init__(self, form: Form, *, reasoning: bool, calls: bool, thinking: bool = False) -> None:
        """
        Args:
            reasoning, calls: whether their markers mean anything here.
            thinking: the answer begins inside a block of reasoning.
        """
        self._kind: Kind = "reasoning" if thinking else "text"
        self._begin: dict[str, Kind] = {}
        self._thought = form.reasoning[1] if form.reasoning else ""
        if reasoning and form.reasoning:
            self._begin[form.reasoning[0]] = "reasoning"
        self._calls = form.calls if calls else {}
        self._begin |= dict.fromkeys(self._calls, "call")
        self._begin |= dict.fromkeys(form.silent if calls else (), "text")
        self._bare = calls and form.bare  # nothing but blanks has arrived
        self._call = ""  # the marker that began the present call
        self._pending = ""
        self._fresh = True  # nothing of this part has been given out: white space is dropped

    def feed(self, text: str) -> Iterator[Segment]:
        self._pending += text
        if self._bare and self._kind == "text":
            if not (begun := self._pending.lstrip()):
                return
            self._bare = False
            if begun.startswith("{"):
                self._kind, self._call = "call", ""
        while True:
            ends = self._ends()
            found = [(at, m) for m in ends if (at := self._pending.find(m)) >= 0]
            if not found:
                break
            at, marker = min(found)
            yield from self._give(self._pending[:at], last=True)
            self._pending = self._pending[at + len(marker) :]
            self._kind, self._fresh = self._begin.get(marker, "text"), True
            self._call = marker if self._kind == "call" else ""
        if self._kind != "call":
            keep = withheld(self._pending, ends)
            ready = self._pending[: len(self._pending) - keep]
            self._pending = self._pending[len(ready) :]
            yield from self._give(ready)

    def close(self) -> Iterator[Segment]:
        if self._kind == "call" and self._calls.get(self._call):  # it was cut off: no call
            self._kind, self._pending = "text", self._call + self._pending
        yield from self._give(self._pending, last=True)
        self._pending = ""

    def _ends(self) -> Sequence[str]:
        """Markers that end the current part."""
        if self._kind == "reasoning":
            return (self._thought,)
        if self._kind == "call":
            end = self._calls.get(self._call)
            return (end,) if end else tuple(self._calls)
        return tuple(self._begin)

    def _give(self, text: str, last: bool = False) -> Iterator[Segment]:
        if self._fresh and self._begin:
            text = text.lstrip("\n")
        if last and self._kind == "call":
            text = text.strip()
        if text:
            self._fresh = False
            yield Segment(self._kind, text)
