"""What a GGUF file says is compared with itself, and the first contradiction is said."""

from __future__ import annotations

import _thread
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import models
from support.gguf_damage import small
from support.gguf_parts import ARRAY, STRING, Key, Parts, take_apart
from support.load_server import LoadServer

from routeahead import Llama, ModelError, SettingsError
from routeahead.llamacpp import gguf_file, native_abort
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.gguf_metadata import read_metadata

TOKENS, MODEL = "tokenizer.ggml.tokens", "tokenizer.ggml.model"
Damage = Callable[[Parts], Parts]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    folder = tmp_path_factory.mktemp("sound")
    names = ["qwen3moe", "deepseek2", "gemma4", "gpt-oss"]
    return {n: take_apart(models.write(folder / f"{n}.gguf", small(n))) for n in names}


def tensor(which: str, **change: object) -> Damage:
    def damage(parts: Parts) -> Parts:
        tensors = [
            replace(t, **change) if t.name == which.encode() else t  # type: ignore[arg-type]
            for t in parts.tensors
        ]
        assert tensors != list(parts.tensors)
        return replace(parts, tensors=tensors)

    return damage


def key(name: str, value: object, kind: int | None = None, element: int = 4) -> Damage:
    return lambda parts: parts.change(name, value, kind, element)


def token(index: int, text: bytes) -> Damage:
    def damage(parts: Parts) -> Parts:
        tokens = list(parts.value(TOKENS))
        tokens[index] = text
        return parts.change(TOKENS, tokens, ARRAY, STRING)

    return damage


def big_endian(parts: Parts) -> Parts:
    return replace(parts, version=struct.unpack("<I", struct.pack(">I", 3))[0])


QWEN, DEEP, GPT, GEMMA = "qwen3moe", "deepseek2", "gpt-oss", "gemma4"
CASES: dict[str, tuple[str, Damage, str]] = {
    # The reason, and not what follows from it.
    "big-endian": (QWEN, big_endian, "written for big-endian machines"),
    "version 1": (QWEN, lambda p: replace(p, version=1), "GGUF version 1"),
    "version 9": (QWEN, lambda p: replace(p, version=9), "GGUF version 9"),
    "keys": (QWEN, lambda p: replace(p, n_keys=2**62), "counts 4611686018427387904 keys"),
    "a key twice": (QWEN, lambda p: replace(p, keys=[*p.keys, p.keys[3]]), "key .* twice"),
    "a tensor elsewhere": (
        QWEN, tensor("blk.1.ffn_down_exps.weight", offset=32), "has offset 32, expected",
    ),
    # What ended the process.
    "no tokenizer": (QWEN, lambda p: p.without(MODEL), "without a tokenizer"),
    "tokenizer none": (QWEN, key(MODEL, b"none"), "is 'none': a model without a tokenizer"),
    "a token twice": (QWEN, token(100, b"<0x40>"), "token 100 is there twice"),
    "a byte without token": (QWEN, token(100, b"hello"), "tokens of 1 bytes are missing"),
    "no tokens": (QWEN, key(TOKENS, [], ARRAY, STRING), "expected a list of tokens"),
    "tokens that are numbers": (QWEN, key(TOKENS, [1, 2], ARRAY, 4), "a list of tok"),
    "bos": (
        QWEN, lambda p: key("tokenizer.ggml.add_bos_token", True, 7)(
            key("tokenizer.ggml.bos_token_id", 7_000)(key(MODEL, b"t5")(p))
        ), "it is added to each text",
    ),
    "template": (
        QWEN, key("tokenizer.chat_template", b"{% for x"), "unexpected end of template",
    ),
    "groups": (DEEP, key("deepseek2.expert_group_count", 3), "expected groups of 2 or more"),
    "groups of one": (DEEP, key("deepseek2.expert_group_count", 8), "from 0 to 7"),
    "groups used": (DEEP, key("deepseek2.expert_group_used_count", 4), "some but not all"),
    "gating": (DEEP, key("deepseek2.expert_gating_func", 9), "from 0 to 4"),
    "rotation": (QWEN, key("qwen3moe.rope.dimension_count", 64), "32 dimensions cannot rotate"),
    "no rotation": (GEMMA, key("gemma4.rope.dimension_count", 0), "is 0: expected"),
    "odd rotation": (GPT, key("gpt-oss.rope.dimension_count", 31), "cannot rotate"),
    "rotation in a window": (
        GEMMA, lambda p: p.without("gemma4.rope.dimension_count_swa"), "cannot rotate",
    ),
    "scaling": (QWEN, key("qwen3moe.rope.scaling.type", b"x", STRING), "expected one of"),
    "experts": (QWEN, key("qwen3moe.expert_count", 9), "ffn_gate_exps.weight has 8 experts"),
    "used": (QWEN, key("qwen3moe.expert_used_count", 9), "a layer has 8 experts"),
    "none used": (QWEN, key("qwen3moe.expert_used_count", 0), "at least 1 in a layer"),
    "used in one layer": (
        QWEN, key("qwen3moe.expert_used_count", [2, 0], ARRAY), "at least 1 in a layer",
    ),
    "used by more layers": (
        QWEN, key("qwen3moe.expert_used_count", [2, 2, 2], ARRAY), "each of 2 layers",
    ),
    "blocks": (QWEN, key("qwen3moe.block_count", 1), "from 2 to 512"),
    "heads": (QWEN, key("qwen3moe.attention.head_count_kv", 3), "does not divide"),
    "epsilon": (
        QWEN, key("qwen3moe.attention.layer_norm_rms_epsilon", -1.0, 6), "negative epsilon",
    ),
    "integer weights": (
        QWEN, tensor("blk.0.ffn_gate_inp.weight", kind=26), "type I32, which",
    ),
    "halved bias": (
        GPT, tensor("blk.1.ffn_down_exps.bias", kind=1), "is a bias of type F16",
    ),
    # What took all memory.
    "context": (QWEN, key("qwen3moe.context_length", 2**31 - 1), "from 1 to 33554432"),
    "head": (GPT, key("gpt-oss.attention.key_length", 1 << 24), "from 1 to 128"),
    # What was printed to the terminal, or read as something else.
    "arch": (QWEN, key("general.architecture", b"a\x1b[31m"), r"is 'a\\x1b\[31m'"),
    "tensor name": (
        QWEN, tensor("blk.1.ffn_down_exps.weight", name=b"\x1b[31m"), r"'\\x1b\[31m' has no p",
    ),
    "list for a count": (QWEN, key("qwen3moe.block_count", [2], ARRAY), r"is \[2\]: "),
    "text for a count": (QWEN, key("qwen3moe.block_count", b"2", STRING), "is '2': expected"),
    "truth for a count": (QWEN, key("qwen3moe.expert_count", True, 7), "is True: expected"),
    "list for shards": (QWEN, key("split.count", [1], ARRAY), "one of .* shards"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contradiction_is_one_line(name: str, sound: dict[str, Parts], tmp_path: Path) -> None:
    arch, damage, says = CASES[name]
    path = damage(sound[arch]).write(tmp_path / "damaged.gguf")
    with pytest.raises(ModelError, match=says) as caught:
        Llama(path, n_ctx=32, n_threads=1, cache_mb=0)
    assert str(caught.value).isprintable()
    assert str(path) in str(caught.value)


def test_top_k_may_differ_by_layer(sound: dict[str, Parts], tmp_path: Path) -> None:
    parts = sound["qwen3moe"].change("qwen3moe.expert_used_count", [2, 1], ARRAY)
    layout = read_layout(parts.write(tmp_path / "puzzle.gguf"))
    assert [layout.top_k(layer) for layer in layout.moe_layers] == [2, 1]
    assert layout.n_expert_used == 2
    first, second = layout.bytes_by_layer().values()
    assert layout.token_bytes() == 2 * first + second
    assert layout.token_bytes(3) == 3 * (first + second)


def test_a_list_by_layer_loads_and_runs(sound: dict[str, Parts], tmp_path: Path) -> None:
    """As converters write it for models whose layers differ; here they are alike."""
    parts = sound["qwen3moe"].change("qwen3moe.expert_used_count", [2, 2], ARRAY)
    llm = Llama(parts.write(tmp_path / "list.gguf"), n_ctx=32, n_threads=1, cache_mb=0)
    llm.eval([5, 6])
    llm.close()


def test_an_assertion_that_nobody_foresaw_is_an_error(
    sound: dict[str, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check, llama.cpp's own assertion fails; the process goes on."""
    monkeypatch.setattr(gguf_file, "check_model", lambda *_: None)
    parts = sound["deepseek2"].change("deepseek2.expert_group_count", 3)
    for _ in range(3):
        with pytest.raises(ModelError, match=r"GGML_ASSERT\(.*\) failed \(llama-model\.cpp:\d+\)"):
            Llama(parts.write(tmp_path / "groups.gguf"), n_ctx=32, n_threads=1, cache_mb=0)
    llm = Llama(
        sound["deepseek2"].write(tmp_path / "sound.gguf"), n_ctx=32, n_threads=1, cache_mb=0
    )
    llm.eval([5])
    llm.close()
    print("stdout is where it was", flush=True)


def test_a_process_that_met_an_assertion_ends_as_others_do(
    sound: dict[str, Parts], tmp_path: Path
) -> None:
    path = sound["qwen3moe"].change("qwen3moe.rope.dimension_count", 2).write(tmp_path / "r.gguf")
    script = (
        "import sys; from routeahead import Llama, ModelError\n"
        "try: Llama(sys.argv[1], n_ctx=32, n_threads=1, cache_mb=0)\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr
    assert "GGML_ASSERT" in done.stdout and len(done.stdout.splitlines()) == 1


def test_guarded_passes_results_errors_and_interrupts_on() -> None:
    assert native_abort.guarded(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        native_abort.guarded(lambda: 1 // 0)
    idents: list[int] = []
    native_abort.guarded(lambda: idents.append(threading.get_ident()))
    assert idents != [threading.get_ident()]


def test_a_signal_waits_for_the_guarded_call() -> None:
    ended: list[bool] = []

    def call() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        native_abort.guarded(call)
    assert ended


def test_a_load_without_a_thread_is_one_line(
    sound: dict[str, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    path = sound["qwen3moe"].write(tmp_path / "model.gguf")
    with pytest.raises(SettingsError, match="cannot start a thread for loading the model"):
        Llama(path, n_ctx=32, n_threads=1)


def swap(folder: Path) -> None:
    """The second and the third file of a set change their names."""
    second, third = (next(folder.glob(f"*-0000{n}-of-*")) for n in (2, 3))
    second.rename(folder / "x")
    third.rename(second)
    (folder / "x").rename(third)


def other_set(folder: Path) -> None:
    """The second file is one of a set of two."""
    parts = take_apart(next(folder.glob("*-00002-of-*")))
    parts.change("split.count", 2, 2).write(next(folder.glob("*-00002-of-*")))


def same_tensor(folder: Path) -> None:
    """The second file has a tensor of the first."""
    first, second = (take_apart(next(folder.glob(f"*-0000{n}-of-*"))) for n in (1, 2))
    tensors = [replace(second.tensors[0], name=first.tensors[0].name), *second.tensors[1:]]
    replace(second, tensors=tensors).write(next(folder.glob("*-00002-of-*")))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (swap, "-00002-of-00003.gguf: says that it is shard 2"),
        (other_set, "-00002-of-00003.gguf: says that it is one of 2 shards"),
        (same_tensor, "is there twice"),
    ],
)
def test_shards_that_are_no_set(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    first = models.write(tmp_path / "model.gguf", small("qwen3moe"), shards=3)
    read_layout(first)
    damage(tmp_path)
    with pytest.raises(ModelError, match=says):
        read_layout(first)


def test_loads_at_once_leave_stdout_alone(sound: dict[str, Parts], tmp_path: Path) -> None:
    path = sound["qwen3moe"].write(tmp_path / "model.gguf")
    script = (
        "import sys, threading; from routeahead import Llama\n"
        "def load():\n"
        "    for _ in range(5): Llama(sys.argv[1], n_ctx=32, n_threads=1, cache_mb=0).close()\n"
        "threads = [threading.Thread(target=load) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print('out'); print('err', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")


def test_walking_a_header_takes_no_more_than_twice_its_memory(tmp_path: Path) -> None:
    words = [f"token-{index}".encode() for index in range(100_000)]
    keys = [
        Key(TOKENS.encode(), ARRAY, words, STRING),
        Key(b"tokenizer.ggml.merges", ARRAY, [b"a " + w for w in words], STRING),
        Key(b"tokenizer.ggml.scores", ARRAY, [0.0] * len(words), 6),
    ]
    path = Parts(keys, [], b"").write(tmp_path / "header.gguf")
    tracemalloc.start()
    values = read_metadata(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values[TOKENS].count == len(words)
    assert peak < 2 * path.stat().st_size


def claiming(path: Path, name: bytes, element: int, count: int, size: int) -> Path:
    """A file of `size` bytes whose only key is an array that claims to have `count` elements."""
    header = b"GGUF" + struct.pack("<I2Q", 3, 0, 1) + struct.pack("<Q", len(name)) + name
    path.write_bytes(header + struct.pack("<2IQ", ARRAY, element, count) + b"\xff" * 1000)
    os.truncate(path, size)
    return path


def peak_of_refusal(path: Path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"says that|ends inside"):
            read_metadata(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [2**20, 2**27, 2**40, 2**62])
@pytest.mark.parametrize("element", [0, 4, STRING, 12])
def test_a_length_that_is_not_there_reserves_nothing(
    tmp_path: Path, element: int, count: int
) -> None:
    path = claiming(tmp_path / "long.gguf", b"k", element, count, 2000)
    assert peak_of_refusal(path) < 1 << 18


@pytest.mark.parametrize("name", [b"k", TOKENS.encode()])
@pytest.mark.parametrize("count", [2**20, 2**24, 2**62])
def test_texts_that_are_not_there_reserve_nothing_in_a_large_file(
    tmp_path: Path, name: bytes, count: int
) -> None:
    path = claiming(tmp_path / "long.gguf", name, STRING, count, 1 << 34)
    assert peak_of_refusal(path) < 1 << 18


def test_the_server_tells_an_abort_from_an_error(
    sound: dict[str, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuzz tests lean on this."""
    server = LoadServer(sound["qwen3moe"].write(tmp_path / "sound.gguf"))
    assert server.load(tmp_path / "sound.gguf")["status"] == "loaded"
    missing = server.load(tmp_path / "missing.gguf")
    assert missing["status"] == "refused" and "missing.gguf" in missing["message"]
    assert server.load(Path("ABORT"))["status"] == "SIGABRT"
    server.close()
