"""Two Mixture-of-Experts language models in PyTorch, computing what llama.cpp computes.

Both have RMS norms, rotary positions (NEOX pairing), grouped queries, and in each layer experts
with a softmax router. `qwen3moe` normalises heads, and the weights of the top-k; `qwen2moe` has
biases on queries, keys and values, keeps the weights as they are, and adds a shared expert with a
gate of its own. (Balancing loss: Switch Transformer, arXiv:2101.03961.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 64  # an expert's rows are padded to a multiple


@dataclass(frozen=True)
class Shape:
    """Widths in numbers; `vocabulary` and `context` in tokens."""

    family: Literal["qwen3moe", "qwen2moe"] = "qwen3moe"
    vocabulary: int = 4096
    layers: int = 12
    width: int = 192
    heads: int = 3
    kv_heads: int = 1
    head: int = 64
    experts: int = 32
    top_k: int = 4
    expert_width: int = 64
    shared_width: int = 0
    context: int = 1024
    rope_base: float = 10_000.0
    epsilon: float = 1e-6


SHAPES = {
    "qwen3moe": Shape(),
    "qwen2moe": Shape(
        family="qwen2moe",
        layers=10,
        width=128,
        heads=2,
        experts=20,
        expert_width=96,
        shared_width=96,
    ),
    # Depth is what route-ahead needs; narrow, so that a token costs little to train.
    "deep": Shape(layers=24, width=64, heads=2, head=32, expert_width=32),
}


class Norm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._epsilon).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        heads, kv_heads, head = shape.heads, shape.kv_heads, shape.head
        bias = shape.family == "qwen2moe"
        self.q = nn.Linear(shape.width, heads * head, bias=bias)
        self.k = nn.Linear(shape.width, kv_heads * head, bias=bias)
        self.v = nn.Linear(shape.width, kv_heads * head, bias=bias)
        self.o = nn.Linear(heads * head, shape.width, bias=False)
        normalised = shape.family == "qwen3moe"
        self.q_norm = Norm(head, shape.epsilon) if normalised else nn.Identity()
        self.k_norm = Norm(head, shape.epsilon) if normalised else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        shape, (batch, length, _) = self._shape, x.shape
        q = self.q_norm(self.q(x).view(batch, length, shape.heads, shape.head))
        k = self.k_norm(self.k(x).view(batch, length, shape.kv_heads, shape.head))
        v = self.v(x).view(batch, length, shape.kv_heads, shape.head)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = shape.heads // shape.kv_heads
        # The heads of a group are rows of one product. (PyTorch's own attention takes twice the
        # time here, forward and backward.)
        rows = (batch * shape.kv_heads, group * length, shape.head)
        q = q.view(batch, length, shape.kv_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(rows)
        k, v = (t.transpose(1, 2).reshape(rows[0], length, -1) for t in (k, v))
        future = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1).repeat(group, 1)
        scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=shape.head**-0.5)
        mixed = torch.bmm(scores.softmax(-1), v)
        mixed = mixed.view(batch, shape.kv_heads, group, length, -1).permute(0, 3, 1, 2, 4)
        return self.o(mixed.reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of (batch, length, heads, head): number i is paired with i + head / 2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Gather(torch.autograd.Function):
    """Rows by `index`, where `inverse` says which of the results each row's gradient comes from.

    Both ways are gathers: autograd's own would scatter. `real` (results, 1) is 0 for the results
    that are only padding.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor, real: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.inverse, ctx.real = inverse, real
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override, no-untyped-def]
        gradient = gradient.index_select(0, ctx.inverse)
        return gradient if ctx.real is None else gradient * ctx.real, None, None, None


class Experts(nn.Module):
    """Routed experts: assignments are sorted by expert, and a projection is one grouped product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        experts, width, inner = shape.experts, shape.width, shape.expert_width
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)
        self.shared = Shared(shape) if shape.shared_width else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, width) → the same, and the balancing loss."""
        shape, tokens = self._shape, len(x)
        with torch.autocast("cpu", enabled=False):
            scores = F.softmax(F.linear(x.float(), self.router.weight), -1)
        weights, chosen = scores.topk(shape.top_k)
        if shape.family == "qwen3moe":
            weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=shape.experts)
        share = counts / len(flat)
        balance = shape.experts * (share * scores.mean(0)).sum()

        # oneDNN compiles a product for every number of rows: few numbers, with some padding.
        padded = (counts + ROWS - 1) // ROWS * ROWS
        order = flat.argsort(stable=True)
        ends = padded.cumsum(0)
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        place = torch.arange(len(flat)) + shift[flat[order]]  # of each sorted assignment
        inverse = torch.empty_like(order).index_copy(0, order, place)
        slots = torch.zeros(int(ends[-1]), dtype=torch.int64).index_copy(0, place, order)
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        real = torch.zeros(len(slots), 1, dtype=kind).index_fill(0, place, 1)
        ends = ends.to(torch.int32)
        rows = x.to(kind).unsqueeze(1).expand(-1, shape.top_k, -1).flatten(0, 1)
        rows = Gather.apply(rows, slots, inverse, None)
        gate, up = F.grouped_mm(rows, self.gate_up.to(kind), offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.to(kind), offs=ends)
        out = Gather.apply(out, inverse, slots, real).view(tokens, shape.top_k, -1)
        routed = torch.bmm(weights.to(kind).unsqueeze(1), out).squeeze(1)
        return routed + self.shared(x) if self.shared else routed, balance


class Shared(nn.Module):
    """An expert that every token uses, as far as its gate lets it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.shared_width, bias=False)
        self.up = nn.Linear(shape.width, shape.shared_width, bias=False)
        self.down = nn.Linear(shape.shared_width, shape.width, bias=False)
        self.open = nn.Linear(shape.width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.open(x)) * self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, shape.epsilon)
        self.attention = Attention(shape)
        self.experts_norm = Norm(shape.width, shape.epsilon)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        routed, balance = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + routed.view_as(x), balance


class Model(nn.Module):
    """Embeddings serve as the output matrix too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.epsilon)
        half = shape.head // 2
        angles = torch.outer(
            torch.arange(shape.context), shape.rope_base ** -(torch.arange(half) / half)
        )
        self.register_buffer("cos", angles.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None, :], persistent=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        for layer in self.layers:  # so that the residual stream does not grow with depth
            for weight in (layer.attention.o.weight, layer.experts.down):
                weight.data *= (2 * shape.layers) ** -0.5

    def forward(self, tokens: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, length) → logits (positions, vocabulary), and the mean balancing loss.

        `wanted` (batch, length) says at which positions; all of them if not given.
        """
        length = tokens.shape[1]
        x, balance = self.embed(tokens), tokens.new_zeros((), dtype=torch.float32)
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x, loss = layer(x, cos, sin)
            balance = balance + loss
        x = x.flatten(0, 1) if wanted is None else x[wanted]
        return F.linear(self.norm(x), self.embed.weight), balance / len(self.layers)
