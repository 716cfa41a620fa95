"""Conversations that outlive the process: the KV state of a context, in files.

A file is llama.cpp's own state of a context, which begins with its tokens. (That of a sequence
lacks what lies outside of a sliding window, and a conversation that is cut back needs it.) Its name
says what it belongs to and what is in it: `<model>-<tokens>-<CRC-32>.kv`. The CRC is checked before
llama.cpp sees a file, because llama.cpp ends the process over a state that was cut short.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from routeahead.chat.generation import common_prefix
from routeahead.engine.llama import Llama
from routeahead.types import Ids

# Fewer tokens are evaluated sooner than a file is opened.
WORTH_KEEPING = 16
# So many tokens are written before another conversation takes their place, although it waits.
WORTH_WAITING = 256
_STALE_S = 600  # a temporary file of that age belongs to a process that has ended
_HEADER = struct.Struct("<III")  # magic, version, number of tokens
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    path: Path
    tokens: Ids


class PromptCache:
    """KV states of one model in a folder, at most `limit` bytes of all models together.

    Used by the evaluation thread alone. Several processes may share the folder: files appear by
    renaming, and one that has gone is a miss.
    """

    def __init__(self, folder: Path, limit: int, llm: Llama) -> None:
        """
        Raises:
            OSError: the folder cannot be made or read.
        """
        self._folder, self._limit = folder, limit
        self._key = model_key(llm)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.glob("*.tmp"):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)
        self._entries = [e for p in folder.glob(f"{self._key}-*.kv") if (e := _entry(p))]

    def restore(self, llm: Llama, tokens: Sequence[int]) -> None:
        """Loads the state that shares most with a prompt, if the context holds less of it."""
        _drop_what_lost_its_window(llm, tokens)
        held = common_prefix(llm, tokens)
        wanted = np.asarray(tokens, dtype=np.int32)
        shared = {e.path: _shared(e.tokens, wanted) for e in self._entries}
        best = max(self._entries, key=lambda e: shared[e.path], default=None)
        found = best and shared[best.path] >= held + WORTH_KEEPING
        if llm.n_tokens - held >= WORTH_WAITING:
            self._save_quietly(llm)
        if best and found and len(best.tokens) < llm.room:
            self._load(llm, best)
            _drop_what_lost_its_window(llm, tokens)

    def save(self, llm: Llama) -> None:
        """Writes the context's state, unless it is short or written already.

        Raises:
            OSError: it could not be written. Nothing of it stays.
        """
        tokens: Ids = np.array(llm.input_ids[: llm.n_tokens], dtype=np.int32)
        if len(tokens) < WORTH_KEEPING:
            return
        if any(_shared(e.tokens, tokens) == len(tokens) for e in self._entries):
            return
        # Rows behind the last token are of answers that were cut; the next batch would remove them.
        memory = llama_cpp.llama_get_memory(llm.ctx)
        llama_cpp.llama_memory_seq_rm(memory, -1, len(tokens), -1)
        size = int(llama_cpp.llama_state_get_size(llm.ctx)) + tokens.nbytes + _HEADER.size
        if size > self._limit:
            return
        self._make_room(size)
        name = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        temporary = self._folder / f"{self._key}-{name}-{os.getpid()}.tmp"
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            ids = (llama_cpp.llama_token * len(tokens))(*tokens.tolist())
            file = os.fsencode(temporary)
            done = llama_cpp.llama_state_save_file(llm.ctx, file, ids, len(tokens))
            if not done or temporary.stat().st_size != size:
                raise OSError(f"{self._folder}: writing the state of a conversation failed")
            path = self._folder / f"{self._key}-{name}-{_crc(temporary, sync=True):08x}.kv"
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        for entry in [e for e in self._entries if _shared(e.tokens, tokens) == len(e.tokens)]:
            self._drop(entry)  # an earlier turn of the same conversation
        self._entries.append(_Entry(path, tokens))

    def _save_quietly(self, llm: Llama) -> None:
        try:
            self.save(llm)
        except OSError as error:
            _log.warning("the conversation was not written to disk: %s", error)

    def _load(self, llm: Llama, entry: _Entry) -> None:
        try:
            crc = _crc(entry.path)
        except FileNotFoundError:  # another process has removed it
            self._entries.remove(entry)
            return
        if not entry.path.stem.endswith(f"-{crc:08x}"):
            _log.warning("%s: is damaged, and was removed", entry.path)
            self._drop(entry)
            return
        count = ctypes.c_size_t()
        ids = (llama_cpp.llama_token * llm.room)()
        _clear(llm)
        read = llama_cpp.llama_state_load_file(
            llm.ctx, os.fsencode(entry.path), ids, llm.room, ctypes.byref(count)
        )
        if not read or count.value != len(entry.tokens):
            _clear(llm)
            self._drop(entry)
            return
        llm.input_ids[: count.value] = entry.tokens
        llm.n_tokens = count.value
        os.utime(entry.path)  # the oldest is removed first

    def _make_room(self, size: int) -> None:
        """Removes the files that were not used for longest, of whichever model."""
        files = []
        for path in self._folder.glob("*.kv"):
            try:
                about = path.stat()
            except FileNotFoundError:
                continue
            files.append((about.st_mtime_ns, about.st_size, path))
        used = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in sorted(files):
            if used + size <= self._limit:
                break
            path.unlink(missing_ok=True)
            used -= bytes_
        self._entries = [e for e in self._entries if e.path.exists()]

    def _drop(self, entry: _Entry) -> None:
        entry.path.unlink(missing_ok=True)
        self._entries.remove(entry)


def model_key(llm: Llama) -> str:
    """What a state belongs to: the model and all settings that change what it computes.

    A file is told by its size, its metadata and tensors' places, and samples of its bytes: reading
    all of a large one takes minutes.
    """
    found = hashlib.sha256(json.dumps(_lossy(llm), sort_keys=True).encode())
    kinds = llm.context_params.type_k, llm.context_params.type_v
    for shard in llm.layout.shards:
        found.update(f"{shard.size} {kinds}".encode())
        with shard.path.open("rb") as file:
            for part in range(64):
                file.seek(part * shard.size // 64)
                found.update(file.read(1 << 14))
    return found.hexdigest()[:16]


def _clear(llm: Llama) -> None:
    llm.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)


def _drop_what_lost_its_window(llm: Llama, tokens: Sequence[int]) -> None:
    """Clears the context if the prompt cuts it back to where a sliding window is incomplete.

    A context that was loaded puts new tokens where those outside of the window were.
    """
    window = llama_cpp.llama_model_n_swa(llm.model)
    held = min(common_prefix(llm, tokens), len(tokens) - 1)
    if window and 0 < held < llm.n_tokens:
        memory = llama_cpp.llama_get_memory(llm.ctx)
        if llama_cpp.llama_memory_seq_pos_min(memory, 0) > max(0, held - window):
            _clear(llm)


# Settings that decide when bytes are read, and not what is computed.
_EXACT = {
    "cache_floor_mb", "cache_mb", "cache_policy", "dense", "direct_io", "fill_cache", "force_cache",
    "io_threads", "overlap", "resident", "throttle", "throttle_latency_ms", "verify_reads",
}  # fmt: skip


def _lossy(llm: Llama) -> dict[str, object]:
    return {name: value for name, value in llm.settings.as_dict().items() if name not in _EXACT}


def _entry(path: Path) -> _Entry | None:
    """The file's tokens, which stand at its start; None if it is no state."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _, _, count = _HEADER.unpack(file.read(_HEADER.size))
            if _HEADER.size + 4 * count > size:
                return None
            tokens = np.frombuffer(file.read(4 * count), dtype="<i4")
            return _Entry(path, tokens)
    except (OSError, struct.error):
        return None


def _shared(a: Ids, b: Ids) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _crc(path: Path, *, sync: bool = False) -> int:
    """Checksum of a file, which is on the disk afterwards if `sync`."""
    crc = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
