"""Which layers go to a device, what of them does, and how much memory that takes there.

llama.cpp counts from the end: the output layer is the first that goes, then the last block, and so
on. Experts never go, nor do their biases and scales, so that a layer's expert products are one part
of the graph; nor do embeddings, which are looked up and not multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routeahead.config import GpuLayers
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB, ModelLayout, TensorInfo

if TYPE_CHECKING:
    from routeahead.llamacpp.devices import Device

EXPERTS = r"^blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_exps\."
_BLOCK = re.compile(r"^blk\.(\d+)\.")
_EXPERTS = re.compile(EXPERTS)
_INPUT = re.compile(r"^(token_embd|token_types|position_embd|per_layer_token_embd)\b")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"

# Left free on the device: what its driver takes, and what the estimate below does not know.
_HEADROOM = 256 * MIB
_KV_BYTES = 2  # of a number in the KV cache: F16, unless `type_k` and `type_v` say otherwise


@dataclass(frozen=True)
class Offload:
    """What goes to a device.

    Attributes:
        layers: how many do, the output layer counted as one.
        total: how many there are.
    """

    layers: int
    total: int

    @property
    def first(self) -> int:
        """The first block on the device."""
        return self.total - self.layers

    @property
    def pattern(self) -> str:
        """What the names of tensors match that stay in host memory and are placed by us.

        Embeddings stay, too, but llama.cpp reads them: a copy of them may be the output layer.
        """
        if not self.layers:
            return ".*"
        blocks = "|".join(map(str, range(self.first)))
        return rf"{EXPERTS}|^blk\.({blocks})\." if blocks else EXPERTS

    def on_device(self, name: str) -> bool:
        """Whether the tensor of that name goes to the device."""
        block = _BLOCK.match(name)
        if not self.layers or _EXPERTS.match(name):
            return False
        return int(block[1]) >= self.first if block else not _INPUT.match(name)

    def on_host(self, layout: ModelLayout) -> list[TensorInfo]:
        """Dense tensors that are read into host memory."""
        return [tensor for tensor in layout.dense if not self.on_device(tensor.name)]

    def device_bytes(self, layout: ModelLayout) -> int:
        """Of dense weights on the device."""
        sizes = _sizes(layout, self.total)
        return sum(sizes[self.total - self.layers :])

    def host_bytes(self, layout: ModelLayout) -> int:
        """Of dense weights in host memory."""
        return sum(tensor.nbytes for tensor in self.on_host(layout))

    def read_by_llama(self, layout: ModelLayout) -> float:
        """The share of the files' tensors that is read by llama.cpp."""
        ours = re.compile(self.pattern)
        others = sum(t.nbytes for t in layout.tensors if not ours.search(t.name))
        sizes = {tensor.name: tensor.nbytes for tensor in layout.tensors}
        if self.layers and _OUTPUT not in sizes:
            others += sizes.get(_EMBEDDING, 0)
        return others / sum(sizes.values())

    def as_dict(self, layout: ModelLayout, devices: Sequence[Device]) -> dict[str, Any]:
        """As a report has it: where the dense weights are, host and device apart."""
        return {
            "layers": self.layers,
            "total_layers": self.total,
            "dense_bytes": self.device_bytes(layout),
            "host_dense_bytes": self.host_bytes(layout),
            "devices": [
                {"name": device.name, "free_bytes": device.free, "total_bytes": device.total}
                for device in devices
            ],
        }

    def describe(self) -> str:
        """Such as "5 of 7 layers (blocks 2-5 and the output)"."""
        blocks = f"blocks {self.first}-{self.total - 2}" if self.layers > 1 else ""
        parts = " and ".join(filter(None, (blocks, "the output")))
        return f"{self.layers} of {self.total} layers ({parts})"


NO_LAYERS = Offload(0, 1)


def plan(layout: ModelLayout, wanted: GpuLayers, *, free: int, context: int, rows: int) -> Offload:
    """Turns the setting into a number of layers.

    Args:
        wanted: a number of layers, -1 or "all" for all, or "auto" for as many as fit.
        free: bytes of the devices' memory that are free, for "auto".
        context: tokens in the context; 0 for the model's.
        rows: rows in a ubatch.

    Raises:
        SettingsError: "auto", and not even the output layer fits.
    """
    total = int(layout.value("block_count") or 0) + 1
    if wanted == "auto":
        context = context or int(layout.value("context_length") or 0)
        needs = layer_needs(layout, context)
        fit = layers_that_fit(needs, free - buffer_bytes(layout, context, rows))
        if not fit:
            raise SettingsError(
                f"gpu layers auto: {free // MIB} MiB are free on the device, and the output layer "
                f"needs {(needs[-1] + buffer_bytes(layout, context, rows)) // MIB} with its "
                "buffers: use a smaller context or ubatch, or leave it out"
            )
        return Offload(fit, total)
    return Offload(total if wanted in ("all", -1) else min(int(wanted), total), total)


def layers_that_fit(needs: Sequence[int], free: int) -> int:
    """How many layers, from the last on, fit in `free` bytes if they need that much each."""
    count = 0
    for need in reversed(needs):
        free -= need
        if free < 0:
            break
        count += 1
    return count


def layer_needs(layout: ModelLayout, context: int) -> list[int]:
    """Bytes that each layer would take on a device: dense weights and KV cache, the output last."""
    per_token = kv_needs(layout)
    sizes = _sizes(layout, len(per_token))
    return [size + kv * context for size, kv in zip(sizes, per_token, strict=True)]


def kv_needs(layout: ModelLayout) -> list[int]:
    """Bytes that a token takes in each layer's KV cache, the output last."""
    return [_kv_bytes(layout, layer) for layer in range(int(layout.value("block_count") or 0) + 1)]


def buffer_bytes(layout: ModelLayout, context: int, rows: int) -> int:
    """An estimate of what the device needs beside weights and KV cache: logits and attention scores
    of a ubatch in float32 (flash attention may be off), and some headroom."""
    shapes = {tensor.name: tensor.shape for tensor in layout.dense}
    vocabulary = (shapes.get(_OUTPUT) or shapes.get(_EMBEDDING) or (0, 0))[1]
    heads = layout.value("attention.head_count") or 0
    heads = max(heads, default=0) if isinstance(heads, list) else heads
    return 4 * rows * (vocabulary + int(heads) * context) + _HEADROOM


def _sizes(layout: ModelLayout, total: int) -> list[int]:
    """Bytes of the dense weights by layer, the output layer last."""
    everything, sizes = Offload(total, total), [0] * total
    for tensor in layout.dense:
        block = _BLOCK.match(tensor.name)
        layer = int(block[1]) if block else total - 1
        if everything.on_device(tensor.name) and layer < total:
            sizes[layer] += tensor.nbytes
    names = {tensor.name: tensor.nbytes for tensor in layout.dense}
    if _OUTPUT not in names:  # the embeddings are the output, too, in a copy of their own
        sizes[-1] += names.get(_EMBEDDING, 0)
    return sizes


def _kv_bytes(layout: ModelLayout, layer: int) -> int:
    """Of one token in a block's KV cache."""
    heads = layout.value("attention.head_count_kv")
    if isinstance(heads, list):
        heads = heads[layer] if layer < len(heads) else 0
    blocks = int(layout.value("block_count") or 0)
    if not heads or layer >= blocks:
        return 0
    queries = layout.value("attention.head_count")
    queries = max(queries) if isinstance(queries, list) else queries
    plain = int(layout.value("embedding_length") or 0) // int(queries or 1)
    widths = [layout.value(f"attention.{part}_length") or plain for part in ("key", "value")]
    return int(heads) * sum(map(int, widths)) * _KV_BYTES
