"""Which layers go to a device, what of them, and how many fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from routeahead.engine.offload import (
    Offload,
    buffer_bytes,
    layer_needs,
    layers_that_fit,
    plan,
)
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB, ModelLayout, Shard, TensorInfo

BLOCKS = 4
SIZES = {  # MiB; of each block, and beside them
    "blk.{}.attn_q.weight": 2,
    "blk.{}.ffn_gate_inp.weight": 1,
    "blk.{}.ffn_gate_exps.weight": 64,
    "blk.{}.ffn_gate_exps.bias": 1,
    "blk.{}.ffn_gate_chexps.weight": 1,
    "token_embd.weight": 10,
    "output_norm.weight": 1,
    "output.weight": 20,
}
VOCABULARY, CONTEXT, ROWS = 1000, 4096, 512


def make(*, tied: bool = False, **metadata: Any) -> ModelLayout:
    names = [name.format(block) for block in range(BLOCKS) for name in SIZES if "{}" in name]
    names += [name for name in SIZES if "{}" not in name and not (tied and name == "output.weight")]
    tensors = [
        TensorInfo(
            name, "F16", (64, VOCABULARY if "exps" not in name else 64, 8), 0, 0,
            SIZES[re.sub(r"blk\.\d", "blk.{}", name)] * MIB,
        )
        for name in names
    ]  # fmt: skip
    values = {
        "block_count": BLOCKS,
        "embedding_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "context_length": CONTEXT,
        **metadata,
    }
    known = {"general.architecture": "x", **{f"x.{key}": value for key, value in values.items()}}
    return ModelLayout([Shard(Path("m.gguf"), 0)], tensors, known)


def test_the_last_layers_go_less_experts_and_embeddings() -> None:
    offload = Offload(3, BLOCKS + 1)
    there = {t.name for t in make().tensors if offload.on_device(t.name)}
    assert there == {
        *(f"blk.{n}.{name}.weight" for n in (2, 3)
          for name in ("attn_q", "ffn_gate_inp", "ffn_gate_chexps")),
        "output.weight", "output_norm.weight",
    }  # fmt: skip
    assert offload.device_bytes(make()) == (2 * 4 + 21) * MIB
    assert offload.host_bytes(make()) == (2 * 4 + 4 * 1 + 10) * MIB
    assert offload.describe() == "3 of 5 layers (blocks 2-3 and the output)"


@pytest.mark.parametrize("layers", range(BLOCKS + 2))
def test_what_we_place_and_what_llama_cpp_reads_are_all(layers: int) -> None:
    """The pattern covers all that stays, but for the embeddings, which may be the output, too."""
    layout, offload = make(), Offload(min(layers, BLOCKS + 1), BLOCKS + 1)
    ours = re.compile(offload.pattern)
    for tensor in layout.tensors:
        placed = bool(ours.search(tensor.name))
        read_by_llama = offload.on_device(tensor.name) or tensor.name == "token_embd.weight"
        assert placed != (read_by_llama and layers > 0), tensor.name
    total = sum(tensor.nbytes for tensor in layout.tensors)
    others = sum(t.nbytes for t in layout.tensors if not ours.search(t.name))
    assert offload.read_by_llama(layout) == others / total


def test_tied_embeddings_are_on_both_sides() -> None:
    layout, offload = make(tied=True), Offload(1, BLOCKS + 1)
    assert offload.device_bytes(layout) == 11 * MIB
    assert offload.host_bytes(layout) == (4 * 5 + 10) * MIB
    assert offload.read_by_llama(layout) == pytest.approx((10 + 10 + 1) / (4 * 69 + 11))


def test_needs_of_a_layer() -> None:
    """Weights, and 2 heads of 128 numbers for keys and for values, of 2 bytes, for each token."""
    kv = 2 * (128 + 128) * 2 * CONTEXT
    assert layer_needs(make(), CONTEXT) == [4 * MIB + kv] * 4 + [21 * MIB]
    lists = make(**{"attention.head_count_kv": [2, 0, 2, 0], "attention.key_length": 64})
    assert layer_needs(lists, CONTEXT)[:2] == [4 * MIB + 2 * (64 + 128) * 2 * CONTEXT, 4 * MIB]


def test_as_many_as_fit() -> None:
    assert layers_that_fit([1, 2, 3, 4], 0) == 0
    assert layers_that_fit([1, 2, 3, 4], 4) == 1
    assert layers_that_fit([1, 2, 3, 4], 9) == 3
    assert layers_that_fit([1, 2, 3, 4], 10) == 4
    layout = make()
    needs, buffers = layer_needs(layout, CONTEXT), buffer_bytes(layout, CONTEXT, ROWS)
    assert buffers == 4 * ROWS * (VOCABULARY + 8 * CONTEXT) + 256 * MIB
    for count in range(1, BLOCKS + 2):
        free = sum(needs[-count:]) + buffers
        given = {"context": 0, "rows": ROWS}
        assert plan(layout, "auto", free=free, **given) == Offload(count, BLOCKS + 1)
        if count > 1:
            assert plan(layout, "auto", free=free - 1, **given).layers == count - 1
    with pytest.raises(SettingsError, match=r"auto: 3 MiB are free on the device, and the output"):
        plan(layout, "auto", free=3 * MIB, context=CONTEXT, rows=ROWS)


@pytest.mark.parametrize(("wanted", "layers"), [(0, 0), (2, 2), (99, 5), (-1, 5), ("all", 5)])
def test_a_number(wanted: Any, layers: int) -> None:
    assert plan(make(), wanted, free=0, context=512, rows=512) == Offload(layers, BLOCKS + 1)
