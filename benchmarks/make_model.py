"""Write a GGUF model of Qwen3-30B-A3B's shape with random weights, to benchmark streaming on.

    python benchmarks/make_model.py qwen-12.gguf --layers 12

Expert and tensor sizes, quantisations and names are the real model's, so reads, cache and
arithmetic cost what they cost there; 12 layers take 4.2 GB and all 48 take 17 GB. The text is
noise, and greedy decoding of a random model soon repeats itself, which makes any cache look good:
measure with random or recorded tokens.

Experts and attention are Q4_K, with Q6_K down projections and attention values on the layers that
`--down-q6k-layers` names; the output matrix is Q6_K, the embeddings are Q4_K, the router and the
norms are float32: the choices of the files labelled Q4_K_M.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType

ARCH = "qwen3moe"
WIDTH = 2048
EXPERTS, EXPERT_WIDTH = 128, 768
HEADS, KV_HEADS, HEAD_WIDTH = 32, 4, 128
LAYERS = 48
VOCABULARY_SIZES = {"tiny": 259, "qwen": 151_936}

# The layers with Q6_K parts in the recorded routing trace (3,059,712 bytes an expert, not
# 2,654,208): the first and the last eighth, and every third between. A shorter model has the
# first layers of that one, so that its layers still match the trace's.
TRACE_Q6K_LAYERS = {i for i in range(LAYERS) if i < 6 or i >= 42 or i % 3 == 2}

UNIT_GAIN = 1 / sqrt(WIDTH)  # weights of this deviation keep the variance of their WIDTH inputs

# An odd stride over a power of two visits every place of the ring before it repeats one.
RING_BLOCKS, RING_STRIDE = 1 << 17, 80_953
STRETCH_BLOCKS = EXPERT_WIDTH * WIDTH // 256  # exactly one expert's slice of a tensor

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Tensor:
    """One tensor to write, and how its random weights are distributed."""

    name: str
    quant: QuantType
    shape: tuple[int, ...]  # elements, in NumPy's order: the input width last
    mean: float = 0.0  # of float32 tensors; that of quantised ones is zero
    std: float = UNIT_GAIN

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes, without the padding that follows."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.quant]
        return prod(self.shape) // block * block_bytes


class BlockRing:
    """A ring of random quantised blocks that lends out a different stretch each time.

    Drawing 17 GB of random numbers would take minutes. A ring of some 20 MB is drawn once instead,
    and every slice of the model starts at another of its 131,072 places, so that no two experts
    are the same bytes although all come from the same ring.
    """

    def __init__(self, rng: np.random.Generator, quant: QuantType, std: float) -> None:
        blocks = random_blocks(rng, quant, RING_BLOCKS, std)
        # A copy of the start behind the end makes every stretch contiguous.
        self._blocks = np.concatenate([blocks, blocks[:STRETCH_BLOCKS]])
        self._place = 0

    def stretch(self, blocks: int) -> memoryview:
        """Return the bytes of the next `blocks` blocks (at most STRETCH_BLOCKS), uncopied."""
        place = self._place
        self._place = (place + RING_STRIDE) % RING_BLOCKS
        return self._blocks[place : place + blocks].data


def random_blocks(
    rng: np.random.Generator, quant: QuantType, count: int, std: float
) -> npt.NDArray[np.uint8]:
    """Return `count` blocks of 256 weights of deviation `std`: uint8, (count, bytes of a block).

    Any bytes are a valid block as long as its float16 steps are sensible. A Q6_K block ends with
    one, d, for weights d*s*q with q in -32..31, and s in -128..127 for each 16 of them. A Q4_K
    block starts with two, d and dmin, for weights d*s*q - dmin*m with q in 0..15, and s and m in
    0..63 for each 32. There m = s and dmin = 7.5*d give each run of 32 a mean of zero. Otherwise
    the runs' means in embeddings and in matrices would reinforce each other, tenfold in layer 0.
    """
    blocks = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[quant][1]), dtype=np.uint8)
    if quant is QuantType.Q4_K:
        step = std / sqrt(21.25 * 1333.5)  # the mean squares of q - 7.5 and of s
        blocks[:, :4] = np.array([step, 7.5 * step], "<f2").view(np.uint8)
        # Four bytes of s, four of m, and four with a half byte of each: equal parts make m = s.
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    else:
        step = std / sqrt(341.5 * 5461.5)
        blocks[:, -2:] = np.array([step], "<f2").view(np.uint8)
    return blocks


def model_tensors(layers: int, vocabulary: int, q6k_layers: set[int]) -> Iterator[Tensor]:
    """Yield every tensor of the model in file order."""
    # Embeddings of unit variance weigh as much as what a layer adds to them, so that the hidden
    # state, and with it the routing, still depends on the token in the last layer.
    yield Tensor("token_embd.weight", QuantType.Q4_K, (vocabulary, WIDTH), std=1.0)
    yield Tensor("output.weight", QuantType.Q6_K, (vocabulary, WIDTH))
    yield norm("output_norm", WIDTH)
    for layer in range(layers):
        better = QuantType.Q6_K if layer in q6k_layers else QuantType.Q4_K
        yield from layer_tensors(f"blk.{layer}.", better)


def layer_tensors(prefix: str, better: QuantType) -> Iterator[Tensor]:
    """Yield one layer's tensors; `better` is for the parts that Q4_K_M files favour."""
    q4_k, f32 = QuantType.Q4_K, QuantType.F32
    queries, keys = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH
    yield norm(prefix + "attn_norm", WIDTH)
    yield Tensor(prefix + "attn_q.weight", q4_k, (queries, WIDTH))
    yield Tensor(prefix + "attn_k.weight", q4_k, (keys, WIDTH))
    yield Tensor(prefix + "attn_v.weight", better, (keys, WIDTH))
    # What tokens get from attention is much the same for all, and at full gain it soon drowns what
    # tells them apart: all are routed alike. At half gain, successive random tokens share 38 % of
    # their experts over 48 layers, as in the recorded trace (16 % over the first 12).
    yield Tensor(prefix + "attn_output.weight", q4_k, (WIDTH, queries), std=UNIT_GAIN / 2)
    yield norm(prefix + "attn_q_norm", HEAD_WIDTH)
    yield norm(prefix + "attn_k_norm", HEAD_WIDTH)
    yield norm(prefix + "ffn_norm", WIDTH)
    # Scores of deviation 2 spread the choices over the experts, differently for each token.
    yield Tensor(prefix + "ffn_gate_inp.weight", f32, (EXPERTS, WIDTH), std=2 * UNIT_GAIN)
    yield Tensor(prefix + "ffn_gate_exps.weight", q4_k, (EXPERTS, EXPERT_WIDTH, WIDTH))
    yield Tensor(prefix + "ffn_up_exps.weight", q4_k, (EXPERTS, EXPERT_WIDTH, WIDTH))
    yield Tensor(prefix + "ffn_down_exps.weight", better, (EXPERTS, WIDTH, EXPERT_WIDTH))


def norm(name: str, width: int) -> Tensor:
    """Return the float32 weights of a normalisation, which scatter about 1."""
    return Tensor(f"{name}.weight", QuantType.F32, (width,), mean=1.0, std=0.1)


def add_metadata(writer: gguf.GGUFWriter, layers: int, vocabulary: int, top_k: int) -> None:
    """Add the settings and the vocabulary; `vocabulary` counts tokens."""
    writer.add_name(f"Random model of Qwen3-30B-A3B's shape, {layers} layers")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(40_960)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(6144)  # no layer uses it, but the real model states it
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(top_k)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    add_vocabulary(writer, vocabulary)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a vocabulary of `size` tokens in which each byte is one, so that any text has tokens.

    The real tokeniser would need its merge table; a SentencePiece vocabulary needs no more than a
    list, and made-up words fill it to the real one's size.
    """
    kinds = gguf.TokenType
    words = [f"▁word{number}".encode() for number in range(size - 259)]
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(types + [kinds.NORMAL] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_model(
    path: Path, tensors: list[Tensor], writer: gguf.GGUFWriter, seed: int, *, hollow: bool
) -> None:
    """Write the header, which the caller has filled with metadata, and stream the tensors."""
    for tensor in tensors:
        # The element type only counts where no quantisation is given.
        element = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, element, tensor.nbytes, tensor.quant)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    write_tensors(writer, tensors, seed, hollow=hollow)
    writer.close()


def write_tensors(
    writer: gguf.GGUFWriter, tensors: list[Tensor], seed: int, *, hollow: bool
) -> None:
    """Write the tensors' data behind the header, each padded to GGUF's alignment."""
    [file] = writer.fout or []
    writer.write_padding(file, file.tell())
    rng = np.random.default_rng(seed)
    rings: dict[tuple[QuantType, float], BlockRing] = {}
    progress = Progress(sum(tensor.nbytes for tensor in tensors))
    for tensor in tensors:
        if tensor.quant is QuantType.F32:
            values = rng.normal(tensor.mean, tensor.std, tensor.shape).astype("<f4")
            file.write(values.tobytes())
        elif hollow and "_exps." in tensor.name:
            file.truncate(file.seek(tensor.nbytes, os.SEEK_CUR))
        else:
            kind = (tensor.quant, tensor.std)
            if kind not in rings:
                rings[kind] = BlockRing(rng, *kind)
            write_blocks(file, rings[kind], prod(tensor.shape) // 256)
        writer.write_padding(file, tensor.nbytes)
        progress.add(tensor)


def write_blocks(file: BinaryIO, ring: BlockRing, blocks: int) -> None:
    """Write that many blocks in stretches, which are single experts in an expert tensor."""
    while blocks > 0:
        count = min(blocks, STRETCH_BLOCKS)
        file.write(ring.stretch(count))
        blocks -= count


class Progress:
    """Shows on standard error how much is written, and how fast."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._start = time.perf_counter()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor, and show the new state."""
        self._done += tensor.nbytes
        rate = self._done / 1e6 / (time.perf_counter() - self._start)
        state = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB at {rate:.0f} MB/s"
        end = "\n" if self._done == self._total else ""
        print(f"\r{state}  {tensor.name:<32}", end=end, file=sys.stderr, flush=True)


def parse_layers(text: str) -> set[int]:
    """Turn "none", "trace" or "0,1,5" into layer numbers."""
    if text == "none":
        return set()
    if text == "trace":
        return TRACE_Q6K_LAYERS
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        message = f"{text!r} is not none, trace or layer numbers such as 0,1,5"
        raise argparse.ArgumentTypeError(message) from None


def parse_arguments() -> argparse.Namespace:
    """Read the command line, and stop with a message if it makes no sense."""
    summary = "Write a random GGUF model of Qwen3-30B-A3B's shape."
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--layers", type=int, default=12, help="default 12; the real model has 48")
    vocab_help = "tiny: 259 tokens (the default); qwen: 151,936, as many as the real model has"
    parser.add_argument("--vocab", choices=VOCABULARY_SIZES, default="tiny", help=vocab_help)
    parser.add_argument("--top-k", type=int, default=8, help="experts a token uses, default 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--down-q6k-layers",
        "--mixed-down",
        type=parse_layers,
        default="none",
        metavar="none|trace|LIST",
        help="layers whose down projections are Q6_K: none (the default), those of the recorded "
        "routing trace, or a list such as 0,1,5",
    )
    parser.add_argument(
        "--hollow",
        action="store_true",
        help="experts are holes in the file: reads give zeros and ask nothing of the disk, so that "
        "with --throttle the same bandwidth is there in every run",
    )
    args = parser.parse_args()
    if not 1 <= args.top_k <= EXPERTS:
        parser.error(f"--top-k must be from 1 to {EXPERTS}")
    if args.layers < 1:
        parser.error("--layers must be at least 1")
    if not args.out.parent.is_dir():
        parser.error(f"there is no directory {args.out.parent}")
    return args


def main() -> None:
    """Write the model that the command line describes."""
    args = parse_arguments()
    vocabulary = VOCABULARY_SIZES[args.vocab]
    tensors = list(model_tensors(args.layers, vocabulary, args.down_q6k_layers))
    needed = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(args.out.parent).free
    if needed > free and not args.hollow:
        sys.exit(f"{args.out} needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free")
    # Nobody can mistake an interrupted write for a model, as it gets its name at the end.
    unfinished = args.out.with_name(args.out.name + ".part")
    writer = gguf.GGUFWriter(None, ARCH)
    add_metadata(writer, args.layers, vocabulary, args.top_k)
    write_model(unfinished, tensors, writer, args.seed, hollow=args.hollow)
    unfinished.replace(args.out)
    print(args.out)


if __name__ == "__main__":
    main()
