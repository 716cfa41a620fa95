"""Writes a trained checkpoint as GGUF: `python training/export.py WORK OUT.gguf`.

Experts in Q4_0, attention and embeddings in Q8_0, router and norms in float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import vocabulary
from gguf import GGMLQuantizationType as QuantType
from model import SHAPES, Shape

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="qwen3moe")
    parser.add_argument("--experts", default="Q4_0", help="quantisation of the experts")
    arguments = parser.parse_args()
    state = torch.load(arguments.work / "checkpoint.pt", weights_only=True)
    shape = SHAPES[arguments.model]
    writer = gguf.GGUFWriter(arguments.out, shape.family)
    add_metadata(writer, shape)
    add_vocabulary(writer, arguments.work / "tokenizer.json")
    for name, weights, quant in tensors(state["model"], shape, QuantType[arguments.experts]):
        writer.add_tensor(name, gguf.quants.quantize(weights, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.1f} MiB")


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"routeahead tiny {shape.family}")
    writer.add_license("apache-2.0")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_expert_feed_forward_length(shape.expert_width)
    if shape.shared_width:
        writer.add_expert_shared_feed_forward_length(shape.shared_width)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)


def add_vocabulary(writer: gguf.GGUFWriter, path: Path) -> None:
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"<|unused {n}|>" for n in range(len(tokens), vocabulary.SIZE)]
    kinds = gguf.TokenType
    unused = range(len(ids), vocabulary.SIZE)
    types = [kinds.CONTROL if t in vocabulary.SPECIAL else kinds.NORMAL for t in tokens]
    for index in unused:
        types[index] = kinds.UNUSED
    merges = [" ".join(m) if isinstance(m, list) else m for m in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[vocabulary.END])
    writer.add_eot_token_id(ids[vocabulary.IM_END])
    writer.add_pad_token_id(ids[vocabulary.END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


# llama.cpp's name in a layer → ours; what a family lacks is absent.
_DENSE = {
    "attn_norm.weight": "attention_norm.weight",
    "attn_q.weight": "attention.q.weight",
    "attn_q.bias": "attention.q.bias",
    "attn_k.weight": "attention.k.weight",
    "attn_k.bias": "attention.k.bias",
    "attn_v.weight": "attention.v.weight",
    "attn_v.bias": "attention.v.bias",
    "attn_output.weight": "attention.o.weight",
    "attn_q_norm.weight": "attention.q_norm.weight",
    "attn_k_norm.weight": "attention.k_norm.weight",
    "ffn_norm.weight": "experts_norm.weight",
    "ffn_gate_inp.weight": "experts.router.weight",
    "ffn_gate_inp_shexp.weight": "experts.shared.open.weight",
    "ffn_gate_shexp.weight": "experts.shared.gate.weight",
    "ffn_up_shexp.weight": "experts.shared.up.weight",
    "ffn_down_shexp.weight": "experts.shared.down.weight",
}


def tensors(
    state: dict[str, torch.Tensor], shape: Shape, experts: QuantType
) -> list[tuple[str, np.ndarray, QuantType]]:
    """(name, weights, quantisation) in llama.cpp's names; NumPy's shapes: the input width last.

    The embeddings are the output matrix too, which llama.cpp has to be told of a qwen2moe only.
    """

    def of(name: str) -> np.ndarray:
        return np.ascontiguousarray(state[name].float().numpy())

    found = [
        ("token_embd.weight", of("embed.weight"), QuantType.Q8_0),
        ("output_norm.weight", of("norm.weight"), QuantType.F32),
    ]
    if shape.family == "qwen2moe":
        found.append(("output.weight", of("embed.weight"), QuantType.Q8_0))
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"blk.{index}."
        for name, part in _DENSE.items():
            if f"{ours}{part}" in state:
                weights = of(f"{ours}{part}")
                weights = weights[0] if len(weights) == 1 else weights  # a gate of one number
                exact = weights.ndim < 2 or "gate_inp" in name
                found.append((theirs + name, weights, QuantType.F32 if exact else QuantType.Q8_0))
        # (experts, in, out) there, (experts, out, in) here
        gate, up = np.split(of(f"{ours}experts.gate_up").transpose(0, 2, 1), 2, axis=1)
        down = of(f"{ours}experts.down").transpose(0, 2, 1)
        for part, weights in (("gate", gate), ("up", up), ("down", down)):
            name = f"{theirs}ffn_{part}_exps.weight"
            found.append((name, np.ascontiguousarray(weights), experts))
    return found


if __name__ == "__main__":
    main()
