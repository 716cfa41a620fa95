"""Compares what a GGUF file says of its model with itself, before llama.cpp believes it.

llama.cpp answers most contradictions with an error, but ends the process over those that are
checked here: its assertions about counts, rotary positions, expert groups and tokens, arithmetic
that it does not check, and weights of a type for which it has no product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeahead.errors import ModelError
from routeahead.experts.layout import ModelLayout, TensorInfo
from routeahead.llamacpp.gguf_metadata import TOKENS, Counted, Value, Vocabulary

_MAX_BLOCKS, _MAX_EXPERTS = 512, 1024  # llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
_MAX_WIDTH = 1 << 24
_MAX_CONTEXT = 1 << 25  # llama-cpp-python takes 4 bytes of each for every text that it tokenises

_GATING_FUNCTIONS = 4
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

# A file's formats of weights that no product takes: integers, and what products are computed in.
_NO_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
_VECTOR_TYPES = {"F32", "F16", "BF16"}
_LOOKUP = "tid2eid"  # DeepSeek 4's table of experts by token: integers on purpose

# Default ids of the tokens that begin and end a text, by tokenizer model.
_DEFAULT_ENDS = {"llama": (1, 2), "gpt2": (11, 11), "bert": (101, None), "t5": (None, 1)}


def check_model(path: Path, layout: ModelLayout) -> None:
    """
    Raises:
        ModelError: the first thing in which the file contradicts itself.
    """
    facts = _Facts(path, layout.metadata, layout.arch)
    _check_arch(facts)
    _check_shape(facts)
    _check_heads(facts, layout.tensors)
    if layout.experts:
        _check_experts(facts, layout)
    else:
        _check_no_experts(facts)
    _check_tensors(path, layout.tensors)
    _check_tokenizer(facts)


class _Facts:
    """The metadata of one model: values by key, refused where they are not what is expected."""

    def __init__(self, path: Path, values: dict[str, Value], arch: str) -> None:
        self._path, self._values, self._arch = path, values, arch

    def get(self, key: str) -> Value | None:
        """The value of `key`, in which a leading dot stands for the architecture's name."""
        return self._values.get(self._full(key))

    def floats(self) -> list[tuple[str, float]]:
        return [(k, v) for k, v in self._values.items() if isinstance(v, float)]

    def count(self, key: str, low: int, high: int) -> int | None:
        """A whole number of that range, or None if the file has none."""
        value = self.get(key)
        if value is not None and not _is_count(value, low, high):
            raise self.error(key, f"expected a whole number from {low} to {high}")
        return value if isinstance(value, int) else None

    def counts(self, key: str, length: int, low: int, high: int) -> list[int]:
        """A whole number for each of `length` layers, of which a file may give one for all."""
        value = self.get(key)
        if value is None:
            return []
        numbers: list[Any] = value if isinstance(value, list) else [value] * length
        if not all(_is_count(number, low, high) for number in numbers):
            raise self.error(key, f"expected whole numbers from {low} to {high}")
        if len(numbers) != length:
            raise self.error(key, f"expected one number for each of {length} layers")
        return numbers

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "expected text")
        return value

    def error(self, key: str, expected: str) -> ModelError:
        value = self.get(key)
        shown = f"has {value.count} elements" if isinstance(value, Counted) else f"is {value!r:.80}"
        return ModelError(
            f"{self._path}: {self._full(key)} {shown}: {expected}; download or convert it again"
        )

    def _full(self, key: str) -> str:
        return self._arch + key if key.startswith(".") else key


def _is_count(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check_arch(facts: _Facts) -> None:
    arch = facts.text("general.architecture")
    if arch is None or not re.fullmatch(r"[\w.-]{1,64}", arch, re.ASCII):
        raise facts.error("general.architecture", "expected the name of an architecture")


def _check_shape(facts: _Facts) -> None:
    blocks = facts.count(".block_count", 1, _MAX_BLOCKS)
    facts.count(".context_length", 1, _MAX_CONTEXT)
    facts.count(".embedding_length", 1, _MAX_WIDTH)
    if blocks is None:
        return  # llama.cpp refuses it
    facts.count(".nextn_predict_layers", 0, blocks)
    facts.count(".leading_dense_block_count", 0, blocks)
    facts.counts(".feed_forward_length", blocks, 0, _MAX_WIDTH)
    heads = facts.counts(".attention.head_count", blocks, 0, _MAX_WIDTH)
    shared = facts.counts(".attention.head_count_kv", blocks, 0, _MAX_WIDTH)
    for queries, keys in zip(heads, shared, strict=False):
        if keys and queries % keys:
            raise facts.error(".attention.head_count_kv", f"does not divide the {queries} heads")
    for key, value in facts.floats():
        if not math.isfinite(value) or (key.endswith("epsilon") and value < 0):
            raise facts.error(key, "expected a finite number, and no negative epsilon")


def _check_heads(facts: _Facts, tensors: Sequence[TensorInfo]) -> None:
    """The widths of attention heads, and how much of them rotates. Layers with a sliding window
    ("_swa") may have their own; where they have none, the others' hold."""
    kind = facts.text(".rope.scaling.type")
    if kind is not None and kind not in _ROPE_SCALINGS:
        raise facts.error(".rope.scaling.type", f"expected one of {', '.join(_ROPE_SCALINGS)}")
    # A head is a part of what some attention tensor gives or takes.
    widest = max((max(t.shape) for t in tensors if ".attn_" in t.name), default=_MAX_WIDTH)
    width, rotated = _head_width(facts), None
    for suffix in ("", "_swa"):
        facts.count(f".attention.value_length{suffix}", 1, widest)
        width = facts.count(f".attention.key_length{suffix}", 1, widest) or width
        key = f".rope.dimension_count{suffix}"
        rotated = facts.count(key, 2, _MAX_WIDTH) or rotated  # of 0, llama.cpp computes for ever
        if rotated and (rotated % 2 or (width and rotated > width)):
            raise facts.error(key, f"{rotated} of a head's {width} dimensions cannot rotate")


def _head_width(facts: _Facts) -> int | None:
    """Dimensions of a head that has no key_length of its own."""
    width, heads = facts.get(".embedding_length"), facts.get(".attention.head_count")
    if isinstance(heads, list):
        heads = max(heads, default=0)
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _check_no_experts(facts: _Facts) -> None:
    if not facts.count(".expert_count", 0, _MAX_EXPERTS):
        facts.count(".expert_used_count", 0, 0)
        facts.count(".expert_group_count", 0, 0)


def _check_experts(facts: _Facts, layout: ModelLayout) -> None:
    declared = facts.count(".expert_count", 0, _MAX_EXPERTS)
    experts = layout.n_expert if declared is None else declared
    for tensor in layout.experts:
        if tensor.n_expert != experts:
            raise facts.error(".expert_count", f"{tensor.name} has {tensor.n_expert} experts")
    last = layout.moe_layers[-1]
    blocks = facts.count(".block_count", last + 1, _MAX_BLOCKS)
    used = facts.counts(".expert_used_count", blocks or last + 1, 0, _MAX_WIDTH)
    if used and max(used) > experts:
        raise facts.error(".expert_used_count", f"a layer has {experts} experts")
    if used and min(used[layer] for layer in layout.moe_layers) < 1:
        raise facts.error(".expert_used_count", "expected at least 1 in a layer with experts")
    facts.count(".expert_gating_func", 0, _GATING_FUNCTIONS)
    _check_groups(facts, experts)


def _check_groups(facts: _Facts, experts: int) -> None:
    groups = facts.count(".expert_group_count", 0, experts - 1)
    used = facts.count(".expert_group_used_count", 0, experts)
    if groups is None or groups < 2:
        return
    if experts % groups or experts // groups < 2:  # a group's score is the sum of its best two
        raise facts.error(
            ".expert_group_count", f"expected groups of 2 or more of the {experts} experts"
        )
    if not used or used >= groups:
        raise facts.error(".expert_group_used_count", f"expected some but not all of {groups}")


def _check_tensors(path: Path, tensors: Sequence[TensorInfo]) -> None:
    names = set[str]()
    for tensor in tensors:
        fault = ""
        if not tensor.name.isprintable():
            fault = "has no printable name"
        elif tensor.name in names:
            fault = "is there twice"
        elif 0 in tensor.shape:
            fault = f"has no elements {tensor.shape}"
        elif tensor.quant in _NO_WEIGHTS and _LOOKUP not in tensor.name:
            fault = f"is of type {tensor.quant}, which no product takes"
        elif tensor.name.endswith(".bias") and tensor.quant != "F32":
            fault = f"is a bias of type {tensor.quant}: expected F32"
        elif len(tensor.shape) == 1 and tensor.quant not in _VECTOR_TYPES | _NO_WEIGHTS:
            fault = f"is a vector of type {tensor.quant}: expected floats"
        if fault:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} {fault}; download or convert it again"
            )
        names.add(tensor.name)


def _check_tokenizer(facts: _Facts) -> None:
    model = facts.text("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        raise facts.error("tokenizer.ggml.model", "a model without a tokenizer cannot be run here")
    tokens = facts.get(TOKENS)
    if not isinstance(tokens, Vocabulary) or not tokens.count:
        raise facts.error(TOKENS, "expected a list of tokens")
    repeated = tokens.repeated()
    if repeated is not None:
        raise facts.error(TOKENS, f"token {repeated} is there twice")
    if model == "llama":
        _check_bytes(facts, tokens)
    _check_ends(facts, str(model), tokens.count)


def _check_bytes(facts: _Facts, tokens: Vocabulary) -> None:
    """A vocabulary that falls back on bytes must have them all: `<0x41>`, or else `A`."""
    spelt = tokens.lacks([f"<0x{byte:02X}>".encode() for byte in range(256)])
    missing = tokens.lacks([bytes([int(token[3:5], 16)]) for token in spelt])
    if missing and len(spelt) < 256:
        raise facts.error(TOKENS, f"the tokens of {len(missing)} bytes are missing")


def _check_ends(facts: _Facts, model: str, count: int) -> None:
    """A token that is added to each text must exist."""
    defaults = _DEFAULT_ENDS.get(model, (None, None))
    for name, default in zip(("bos", "eos"), defaults, strict=True):
        token = facts.get(f"tokenizer.ggml.{name}_token_id")
        known = token if _is_count(token, 0, count - 1) else default
        added = facts.get(f"tokenizer.ggml.add_{name}_token")
        if added is True and not _is_count(known, 0, count - 1):
            raise facts.error(
                f"tokenizer.ggml.{name}_token_id", "it is added to each text: expected a token"
            )
