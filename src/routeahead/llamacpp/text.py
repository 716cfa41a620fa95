"""Text and file names as llama.cpp takes and gives them: bytes, of any length."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import llama_cpp


class FileName(str):
    """A file's name that llama-cpp-python hands to llama.cpp as the system spells it.

    It calls `encode("utf-8")`, which refuses or changes names that are not UTF-8.
    """

    def encode(self, encoding: str = "", errors: str = "") -> bytes:
        return os.fsencode(str(self))


def detokenize(vocab: Any, bos: int, tokens: Sequence[int], special: bool = False) -> bytes:
    """Bytes of `tokens`, as `llama_cpp._internals.LlamaModel.detokenize` gives them, which leaves
    out tokens longer than 32 bytes.

    Args:
        vocab: a `llama_vocab` pointer.
        bos: the token that begins a text.
        special: whether special tokens are spelt out.
    """
    output = b"".join(_piece(vocab, token, special) for token in tokens)
    # A space was put before a text that begins with the token for its beginning.
    begins = len(tokens) > 0 and tokens[0] == bos
    return output[1:] if begins and output[:1] == b" " else output


def _piece(vocab: Any, token: int, special: bool) -> bytes:
    room = 64
    while True:
        buffer = ctypes.create_string_buffer(room)
        count: int = llama_cpp.llama_token_to_piece(vocab, token, buffer, room, 0, special)
        if count >= 0:
            return buffer.raw[:count]
        room = -count
