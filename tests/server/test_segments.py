"""The parts of an answer, however it is cut into pieces."""

from __future__ import annotations

import pytest

from routeahead.chat.segments import Segments, withheld
from routeahead.chat.tools import read_call

CALL = '{"name": "f", "arguments": {"a": "<think>"}}'


def parts(text: str, size: int, **known: bool) -> list[tuple[str, str]]:
    """Kind and text of each part, the pieces of one joined."""
    segments = Segments(**{"reasoning": True, "calls": True, **known})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found: list[tuple[str, str]] = []
    for piece in (*(s for p in pieces for s in segments.feed(p)), *segments.close()):
        if found and found[-1][0] == piece.kind != "call":
            found[-1] = piece.kind, found[-1][1] + piece.text
        else:
            found.append((piece.kind, piece.text))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
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
    assert read_call('{"name": "f", "arguments": {"a": 1}}') == ("f", '{"a": 1}')
    assert read_call('{"name": "f"}') == ("f", "{}")
    for text in ("", "[]", "{}", '{"name": 1}', "[" * 10**5, "null", '"name"'):
        assert read_call(text) is None
