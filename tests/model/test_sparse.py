"""A model far larger than this machine loads, with memory for its dense weights alone."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

WIDTH, EXPERT_WIDTH, EXPERTS, LAYERS = 256, 2048, 512, 120
GIB = 1 << 30


def write_sparse(path: Path) -> int:
    """A qwen3moe file whose expert tensors are holes: read as zeros, stored as nothing."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in {
        "context_length": 128, "embedding_length": WIDTH, "block_count": LAYERS,
        "feed_forward_length": 128, "expert_count": EXPERTS, "expert_used_count": 4,
        "expert_feed_forward_length": EXPERT_WIDTH, "attention.head_count": 4,
        "attention.head_count_kv": 4, "attention.key_length": 32, "attention.value_length": 32,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{b:02X}>".encode() for b in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3] + [6] * 256)

    rng = np.random.default_rng(0)
    dense: dict[str, np.ndarray] = {
        "token_embd.weight": rng.standard_normal((len(tokens), WIDTH), dtype=np.float32),
        "output.weight": rng.standard_normal((len(tokens), WIDTH), dtype=np.float32),
        "output_norm.weight": np.ones(WIDTH, np.float32),
    }
    experts: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            dense[f"{prefix}{name}.weight"] = np.ones(WIDTH, np.float32)
        for name in ("attn_q_norm", "attn_k_norm"):
            dense[f"{prefix}{name}.weight"] = np.ones(32, np.float32)
        for name, rows, columns in [
            ("attn_q", 128, WIDTH), ("attn_k", 128, WIDTH), ("attn_v", 128, WIDTH),
            ("attn_output", WIDTH, 128), ("ffn_gate_inp", EXPERTS, WIDTH),
        ]:  # fmt: skip
            values = rng.standard_normal((rows, columns), dtype=np.float32)
            dense[f"{prefix}{name}.weight"] = values / np.float32(columns**0.5)
        for name, rows, columns in [
            ("gate", EXPERT_WIDTH, WIDTH), ("up", EXPERT_WIDTH, WIDTH),
            ("down", WIDTH, EXPERT_WIDTH),
        ]:  # fmt: skip
            experts[f"{prefix}ffn_{name}_exps.weight"] = (EXPERTS, rows, columns)

    for name, array in dense.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    for name, shape in experts.items():
        nbytes = 2 * int(np.prod(shape))
        writer.add_tensor_info(name, shape, np.dtype(np.float16), nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.seek(-(-file.tell() // 32) * 32)
        for array in dense.values():
            file.write(array.tobytes())
            file.seek(-(-file.tell() // 32) * 32)
        end = file.tell() + sum(2 * int(np.prod(shape)) for shape in experts.values())
        file.truncate(end)
    return end


# In a process of its own: the peak of this one's memory is the other tests'.
PROBE = """
import sys
from routeahead import Llama
from routeahead.telemetry.counters import peak_rss_bytes
llm = Llama(sys.argv[1], n_ctx=64, n_threads=1, cache_mb=0)
loaded = peak_rss_bytes()
assert llm.source.lanes.bytes_read == 0, "loading read experts"
llm.phase = "decode"
for token in (5, 6, 7):
    llm.eval([token])
print(llm.layout.file_bytes, llm.layout.dense_bytes, loaded, peak_rss_bytes(),
      llm.counters.decode.bytes_read)
"""


@pytest.mark.xdist_group("machine")
def test_a_file_of_many_times_the_memory_loads(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    try:
        size = write_sparse(path)
    except OSError as error:
        if error.errno == errno.EFBIG:
            pytest.skip("this file system has no files of that size")
        raise
    assert size > 90 * GIB
    done = subprocess.run(
        [sys.executable, "-c", PROBE, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file_bytes, dense_bytes, loaded, peak, read = map(int, done.stdout.split())
    assert file_bytes == size
    expert = 3 * 2 * WIDTH * EXPERT_WIDTH
    assert read >= 3 * LAYERS * 4 * expert
    assert loaded < dense_bytes + 300 * (1 << 20)
    # A layer's experts of three tokens, and a page at the edge of each slice.
    assert peak < loaded + 12 * expert + 100 * (1 << 20)
