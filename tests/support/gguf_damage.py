"""Strategies that damage a GGUF file: what it says, what it is made of, and single bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from support import models
from support.gguf_parts import ARRAY, STRING, Key, Parts, Tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]

EDGES = [0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 64, 127, 128, 255, 256, 512, 513, 1000, 1024, 65535]
LARGE = [2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [
    b"", b"none", b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"gemma4", b"qwen3moe", b"mamba",
    b"deepseek2", b"clip", b"yarn", b"longrope", b"\xff\xfe", b"\x1b[31mred\x07", b"a\nb\0c",
    b"{% for x", b"{{ 1 // 0 }}", b"x" * 5000, "é世界".encode(),
]  # fmt: skip

_RANGES = {
    0: (0, 8),
    1: (1, 8),
    2: (0, 16),
    3: (1, 16),
    4: (0, 32),
    5: (1, 32),
    10: (0, 64),
    11: (1, 64),
}
numbers = st.sampled_from(EDGES) | st.sampled_from(LARGE) | st.integers(0, 2**16)
floats = st.sampled_from(
    [0.0, -1.0, 1e-6, 1.0, 1e4, 1e30, float("nan"), float("inf"), -float("inf")]
)


def scalars(kind: int) -> st.SearchStrategy[Any]:
    """Values of a GGUF type."""
    if kind == STRING:
        return st.sampled_from(TEXTS)
    if kind == 7:
        return st.booleans()
    if kind in (6, 12):
        return floats
    signed, bits = _RANGES[kind]
    top = 2 ** (bits - signed)
    return numbers.map(lambda n: n % top) | (st.just(-1) if signed else st.just(top - 1))


# Hypothesis likes the ends of a range: what is to be rare stands in the middle.
RARELY = [*[False] * 12, True, *[False] * 8]

KINDS = [*_RANGES, 6, 7, STRING, 12]


@st.composite
def values(draw: Draw, name: bytes) -> Key:
    """A key with any value of any type."""
    kind = draw(st.sampled_from([*KINDS, ARRAY]))
    if kind != ARRAY:
        return Key(name, kind, draw(scalars(kind)))
    element = draw(st.sampled_from(KINDS))
    return Key(name, ARRAY, draw(st.lists(scalars(element), max_size=20)), element)


@st.composite
def changed_key(draw: Draw, parts: Parts) -> Parts:
    """Another value of a key: of its type, of any type, or with an array that is longer, shorter
    or has elements of others."""
    index = draw(st.integers(0, len(parts.keys) - 1))
    key = parts.keys[index]
    if key.kind != ARRAY:
        new = draw(scalars(key.kind).map(lambda v: replace(key, value=v)) | values(key.name))
    else:
        old, place = list(key.value), draw(st.integers(0, max(0, len(key.value) - 1)))
        way = draw(st.sampled_from(["any", "cut", "grow", "element", "repeat", "drop"]))
        if way == "any" or not old:
            new = draw(values(key.name))
        elif way == "cut":
            new = replace(key, value=old[:place])
        elif way == "grow":
            new = replace(key, value=old + old[:place])
        elif way == "drop":
            new = replace(key, value=old[:place] + old[place + 1 :])
        else:
            other = old[0] if way == "repeat" else draw(scalars(key.element))
            new = replace(key, value=[*old[:place], other, *old[place + 1 :]])
    return replace(parts, keys=[*parts.keys[:index], new, *parts.keys[index + 1 :]])


@st.composite
def changed_keys(draw: Draw, parts: Parts) -> Parts:
    """Keys that are gone, there twice, renamed or new."""
    keys = list(parts.keys)
    index = draw(st.integers(0, len(keys) - 1))
    way = draw(st.sampled_from(["drop", "twice", "rename", "new"]))
    if way == "drop":
        del keys[index]
    elif way == "twice":
        keys.append(keys[index])
    elif way == "rename":
        keys[index] = replace(keys[index], name=draw(st.sampled_from(TEXTS)))
    else:
        named = [k.name.decode(errors="replace").split(".") for k in keys]
        arch = next((n[0] for n in named if n[1:] == ["block_count"]), "general")
        keys.append(
            draw(st.sampled_from(NEW_KEYS).flatmap(lambda k: values(k.format(arch).encode())))
        )
    return replace(parts, keys=keys)


NEW_KEYS = [
    "{}.expert_group_count", "{}.expert_group_used_count", "{}.expert_gating_func",
    "{}.expert_weights_scale", "{}.expert_shared_count", "{}.leading_dense_block_count",
    "{}.nextn_predict_layers", "{}.rope.scaling.type", "{}.rope.scaling.factor",
    "{}.rope.scaling.original_context_length", "{}.rope.dimension_sections",
    "{}.attention.sliding_window", "{}.attention.sliding_window_pattern", "{}.vocab_size",
    "{}.attention.causal", "{}.pooling_type", "{}.embedding_length_out", "{}.logit_scale",
    "{}.attention.key_length_swa", "{}.attention.max_alibi_bias", "{}.attention.clamp_kqv",
    "general.alignment", "general.name", "general.type", "split.count", "split.no",
    "split.tensors.count", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.pre",
    "tokenizer.ggml.merges", "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.token_type_count",
    "tokenizer.chat_template", "tokenizer.chat_template.tool", "tokenizer.ggml.suppress_tokens",
]  # fmt: skip


@st.composite
def changed_tensor(draw: Draw, parts: Parts) -> Parts:
    """A tensor that is gone, there twice, renamed, or of another shape, type or place."""
    tensors = list(parts.tensors)
    index = draw(st.integers(0, len(tensors) - 1))
    tensor: Tensor = tensors[index]
    way = draw(st.sampled_from(["drop", "twice", "rename", "shape", "kind", "offset", "last"]))
    if way == "drop":
        del tensors[index]
    elif way == "twice":
        tensors.append(tensor)
    elif way == "rename":
        other = draw(st.sampled_from(TEXTS) | st.sampled_from([t.name for t in tensors]))
        tensors[index] = replace(tensor, name=other)
    elif way == "shape":
        shape = tensor.shape
        new = draw(st.permutations(shape) | st.just((*shape, 1)) | st.lists(numbers, max_size=5))
        tensors[index] = replace(tensor, shape=tuple(new))
    elif way == "kind":
        tensors[index] = replace(tensor, kind=draw(st.integers(0, 45) | st.sampled_from(LARGE[:4])))
    elif way == "offset":
        tensors[index] = replace(tensor, offset=draw(numbers.map(lambda n: n % 2**64)))
    else:  # the last tensor's size bothers no other
        tensors[-1] = replace(tensors[-1], kind=draw(st.integers(0, 45)))
    return replace(parts, tensors=tensors)


@st.composite
def changed_frame(draw: Draw, parts: Parts) -> Parts:
    """Another magic, version or count, or less data."""
    way = draw(st.sampled_from(["magic", "version", "keys", "tensors", "data"]))
    if way == "magic":
        return replace(parts, magic=draw(st.sampled_from([b"GGML", b"FUGG", b"\x1b[1m", b"GGUf"])))
    if way == "version":
        return replace(parts, version=draw(st.sampled_from([0, 1, 2, 4, 3 << 24, 2**32 - 1])))
    if way == "data":
        return replace(parts, data=parts.data[: draw(st.integers(0, len(parts.data)))])
    count = draw(numbers.map(lambda n: n % 2**64))
    return replace(parts, n_keys=count) if way == "keys" else replace(parts, n_tensors=count)


CHANGES = [
    *[changed_key] * 4, changed_keys, changed_frame, changed_tensor, changed_keys, changed_tensor,
    *[changed_key] * 4,
]  # fmt: skip


@st.composite
def damaged(draw: Draw, parts: Parts) -> bytes:
    """The bytes of a file that has been damaged once or twice, by its structure or by bytes."""
    for _ in range(draw(st.integers(1, 2))):
        change = draw(st.sampled_from(CHANGES))
        parts = draw(change(parts))
    header = bytearray(parts.header())
    if draw(st.sampled_from(RARELY)):
        place = draw(st.integers(0, len(header) - 1))
        if draw(st.booleans()):
            header[place] = draw(st.integers(0, 255))
        else:  # a length, most often: eight bytes at once
            header[place : place + 8] = draw(numbers.map(lambda n: n % 2**64)).to_bytes(8, "little")
    if draw(st.sampled_from(RARELY)):
        return bytes(header[: draw(st.integers(0, len(header)))])
    return bytes(header) + bytes(-len(header) % parts.alignment) + parts.data


def small(arch: str) -> models.Spec:
    """A model of an architecture that loads in a hundredth of a second."""
    spec = replace(
        models.FIXTURES[{"llama": "mixtral", "deepseek2": "deepseek2-grouped"}.get(arch, arch)],
        layers=3 if arch == "gemma4" else 2, experts=8, top_k=2, width=64, expert_width=32,
    )  # fmt: skip
    return replace(spec, groups=4, shared_width=32) if arch == "deepseek2" else spec


ARCHITECTURES = ["qwen3moe", "deepseek2", "gemma4", "gpt-oss", "llama"]
