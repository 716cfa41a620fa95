"""The composition root: a `llama_cpp.Llama` whose experts stay on disk."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import llama_cpp
import psutil

from routeahead.config import CacheSize, DenseMode, Settings
from routeahead.engine.gguf_file import read_layout
from routeahead.engine.graph_hook import GraphHook
from routeahead.engine.memory import available_bytes
from routeahead.engine.placement import Placement
from routeahead.engine.stream import Stream
from routeahead.errors import ModelError, SettingsError, StreamError
from routeahead.experts.arena import Arena
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.experts.reader import FileReader, Reader
from routeahead.experts.source import ExpertSource, dense_runs, read_dense
from routeahead.telemetry.counters import Counters, Totals, cpu_s

Phase = Literal["prefill", "decode"]
# Left free by an automatic cache: llama.cpp's compute buffers, Python, the kernel.
_HEADROOM = 512 * MIB


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads not counted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(psutil.cpu_count(logical=False) or 1, allowed or 1))


class Llama(llama_cpp.Llama):
    """Takes everything that `llama_cpp.Llama` takes, and the streaming settings.

    Whatever accepts a llama-cpp-python model accepts this one. One thread may use it at a time.

    Attributes:
        settings: the streaming settings, validated.
        layout: where the model's tensors lie.
        direct_io: whether experts are read past the page cache.
        counters: what has been counted since the load.
        phase: what the next batch is; `generate` declares it, and direct callers of `eval` may.
            The number of rows does not tell: a prompt's last row looks like a decode.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        resident: bool = False,
        cache_mb: CacheSize = "auto",
        force_cache: bool = False,
        io_threads: int | None = None,
        overlap: bool = True,
        dense: DenseMode = "anon",
        direct_io: bool = True,
        wrap_reader: Callable[[Reader], Reader] | None = None,
        poison: bool = False,
        progress: Callable[[int, int], None] | None = None,
        cap_context: bool = False,
        **llama: Any,
    ) -> None:
        """
        Args:
            resident ... direct_io: see `routeahead.config.Settings`.
            wrap_reader: puts another reader between the lanes and the disk (experiments, tests).
            poison: makes access to an expert that was not provided a crash (tests).
            progress: called with (bytes, bytes in all) while the dense weights are read.
            cap_context: take `n_ctx` as a wish and the model's trained context as its limit.
            llama: passed on to `llama_cpp.Llama`.

        Raises:
            ModelError: the file cannot be used.
            SettingsError: settings contradict each other or the cache is too small.
        """
        started = time.perf_counter()
        self._closers = contextlib.ExitStack()  # first: `close` runs whatever fails after it
        defaults = {} if io_threads is None else {"io_threads": io_threads}
        self.settings = Settings(
            resident=resident,
            cache_mb=cache_mb,
            force_cache=force_cache,
            overlap=overlap,
            dense=dense,
            direct_io=direct_io,
            **defaults,
        ).validate()
        self.layout = read_layout(model_path)
        trained = self.layout.value("context_length")
        if cap_context and trained:
            llama["n_ctx"] = min(llama["n_ctx"], int(trained))
        self.counters = Counters()
        self.phase: Phase = "prefill"
        self._placement: Placement | None = None
        self._stream: Stream | None = None
        self._hook: GraphHook | None = None
        self.direct_io = False
        try:
            if not resident:
                self._prepare_stream(wrap_reader, poison)
            self._load(llama, progress)
        except BaseException:
            self._closers.close()
            raise
        self.counters.load_s = time.perf_counter() - started

    # --- the way in: everything that llama_cpp.Llama's constructor does not expose ---

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        """The constructor's `self.model_params = llama_model_default_params()` arrives here."""
        params.use_extra_bufts = False  # a repacked weight no longer has the file's layout
        if self._placement:
            self._placement.inject(params)
        self._model_params = params

    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.op_offload = False
        if self._hook:
            params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(self._hook.callback)
            params.cb_eval_user_data = self._hook.user_data
        self._context_params = params

    # --- loading ---

    def _prepare_stream(self, wrap_reader: Callable[[Reader], Reader] | None, poison: bool) -> None:
        layout = self.layout
        if not layout.experts:
            raise ModelError(
                f"{layout.shards[0].path}: has no experts ({layout.arch}), so there is nothing to "
                "stream; --resident runs it"
            )
        self._arena = Arena(layout.shards, poison=poison)
        places = {t.name: self._arena.address(t.shard, t.offset) for t in layout.tensors}
        try:
            self._placement = Placement(places.__getitem__)
        except StreamError as error:
            self._fall_back(error)
            return
        reader = FileReader(layout.shards, direct=self.settings.direct_io)
        if reader.fallback:
            warnings.warn(f"reading through the page cache: {reader.fallback}", stacklevel=4)
        self.direct_io = reader.direct
        self._reader: Reader = wrap_reader(reader) if wrap_reader else reader

    def _fall_back(self, error: StreamError) -> None:
        """Without the struct layout that streaming needs, the model is loaded whole, if it fits."""
        need, free = self.layout.file_bytes, available_bytes()
        if need > free:
            raise StreamError(
                f"cannot stream ({error}), and {need // MIB} MiB do not fit in the "
                f"{free // MIB} MiB that are free"
            ) from error
        warnings.warn(f"cannot stream, so the whole model is loaded: {error}", stacklevel=5)
        self.settings = Settings(resident=True)

    def _load(self, llama: dict[str, Any], progress: Callable[[int, int], None] | None) -> None:
        if llama.get("n_gpu_layers") or llama.get("use_mlock"):
            raise SettingsError("n_gpu_layers and use_mlock load the experts: leave them out")
        llama.setdefault("verbose", False)
        llama.setdefault("n_threads", physical_cores())
        llama.setdefault("n_threads_batch", llama["n_threads"])
        llama["use_mmap"] = False
        path = str(self.layout.shards[0].path)
        if self._placement:
            self._hook = GraphHook()
        try:
            super().__init__(path, **llama)
        except (ValueError, RuntimeError) as error:
            if self._placement:
                self._placement.finish(loaded=False)
            raise ModelError(f"{path}: llama.cpp cannot load it: {error}") from error
        if self._placement and self._hook:
            self._placement.finish(loaded=True)
            stream = self._start_stream(self._placement, self._hook, progress)
            overrides = llama.get("kv_overrides") or {}
            top_k = overrides.get(f"{self.layout.arch}.expert_used_count")
            stream.source.cache.budget = self._budget(top_k)
        self._plain_decode = self._ctx.decode
        self._ctx.decode = self._decode  # type: ignore[method-assign]

    def _start_stream(
        self,
        placement: Placement,
        hook: GraphHook,
        progress: Callable[[int, int], None] | None,
    ) -> Stream:
        # llama.cpp skips tensors it has no use for (multi-token prediction layers): so do we.
        used = [t for t in self.layout.tensors if t.name in placement.tensors]
        self.layout = layout = ModelLayout(self.layout.shards, used, self.layout.metadata)
        if self.settings.dense == "anon":
            read_dense(layout.dense, self._arena, self._reader, progress=progress)
        else:
            self._map_dense()
        source = ExpertSource(layout, self._arena, self._reader, lanes=self.settings.io_threads)
        self._closers.callback(source.close)
        structs = {placement.tensors[e.name]: e for e in layout.experts}
        self._stream = Stream(source, structs, overlap=self.settings.overlap)
        hook.attach(self._stream)
        return self._stream

    def _map_dense(self) -> None:
        for shard, start, end in dense_runs(self.layout.dense):
            with self.layout.shards[shard].path.open("rb") as file:
                self._arena.map_file(shard, start, end, file.fileno())

    def _budget(self, top_k: int | None) -> int:
        """Cache size in bytes."""
        layout, size = self.layout, self.settings.cache_mb
        least = layout.token_bytes(top_k)
        if size == "auto":
            # Dense weights, KV cache and context exist by now, so what is free is free for experts
            # except for one layer that a prompt may take beyond the budget.
            free = available_bytes() - _HEADROOM - layout.layer_bytes()
            if free < least:
                raise SettingsError(
                    f"{max(0, free) // MIB} MiB are left for the expert cache and one token routes "
                    f"to {-(-least // MIB)} MiB: use a smaller context, or cache_mb=0"
                )
            return min(free, layout.expert_bytes)
        budget = size * MIB
        if 0 < budget < least and not self.settings.force_cache:
            raise SettingsError(
                f"cache_mb={size} is less than one token routes to: give at least "
                f"{-(-least // MIB)}, or 0 for none, or force it with force_cache"
            )
        return budget

    # --- running ---

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As `llama_cpp.Llama.generate`; declares the prompt prefill, and decode what follows.

        Raises:
            SettingsError: the prompt does not fit in the context.
        """
        if len(tokens) >= self.n_ctx():
            raise SettingsError(
                f"the prompt has {len(tokens)} tokens and the context {self.n_ctx()}: "
                "shorten the prompt or raise n_ctx (-c)"
            )
        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        self.phase = "prefill"
        try:
            while True:
                token = inner.send(sent)
                self.phase = "prefill"  # what others evaluate while this generator rests
                sent = yield token
                self.phase = "decode"
        except StopIteration:
            return
        finally:
            self.phase = "prefill"

    def _decode(self, batch: Any) -> None:
        """Runs one batch, counts it, and turns a fault inside the graph into an exception.

        Raises:
            ReadError: an expert's bytes did not arrive. The batch left no trace in the context.
        """
        phase, hook = self.phase, self._hook
        before = self._reading()
        if hook:
            hook.begin()
        try:
            self._plain_decode(batch)
            if hook:
                hook.check()
        except BaseException:
            self._undo()
            raise
        step = self._reading().minus(before)
        step.tokens, step.steps = batch.batch.n_tokens, 1
        self.counters.totals(phase).add(step)

    def _undo(self) -> None:
        """After a failed batch: back to the state before it."""
        if self._stream:
            self._stream.recover()
        self._requires_eval = True
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            # Recurrent state cannot be cut: start over.
            self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
            self.n_tokens = 0

    def _reading(self) -> Totals:
        """The running totals of everything that a step adds to."""
        now = Totals(wall_s=time.perf_counter(), cpu_s=cpu_s())
        if self._stream:
            source = self._stream.source
            now.stall_s, now.mgmt_s = source.stall_s, self._stream.mgmt_s
            now.io_s = source.lanes.busy_s
            now.bytes_read, now.reads = source.lanes.bytes_read, source.lanes.reads
            now.hits, now.misses = source.cache.hits, source.cache.misses
        return now

    @property
    def source(self) -> ExpertSource | None:
        """The expert source; None where the model is resident."""
        return self._stream.source if self._stream else None

    @property
    def stops(self) -> int:
        """Calls from the graph into Python so far."""
        return self._hook.calls if self._hook else 0

    def close(self) -> None:
        """Frees the context and the model, then stops the lanes."""
        if hasattr(self, "_stack"):
            super().close()
        self._closers.close()
