"""The composition root: a `llama_cpp.Llama` whose experts stay on disk."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import llama_cpp
import psutil
from jinja2 import TemplateError

from routeahead.config import Settings
from routeahead.engine.memory import available_bytes
from routeahead.engine.policies import Steering
from routeahead.engine.streamed_model import Progress, StreamedModel, WrapReader
from routeahead.errors import ModelError, RouteAheadError, SettingsError, StreamError
from routeahead.experts.layout import MIB
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp import native_abort, native_log
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.text import FileName, detokenize
from routeahead.telemetry.counters import Counters, Phase, Totals, cpu_s
from routeahead.telemetry.recorder import NOTHING, Outputs


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
        streamed: the streaming parts; None where the model is resident.
        counters: what has been counted since the load.
        phase: what the next batch is; `generate` declares it, and direct callers of `eval` may.
            The number of rows does not tell: a prompt's last row looks like a decode.
    """

    streamed: StreamedModel | None = None

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        wrap_reader: WrapReader | None = None,
        poison: bool = False,
        progress: Progress | None = None,
        cap_context: bool = False,
        outputs: Outputs = NOTHING,
        **arguments: Any,
    ) -> None:
        """
        Args:
            wrap_reader: puts another reader between the lanes and the disk (experiments, tests).
            poison: makes access to an expert that was not provided a crash (tests).
            progress: called with (bytes, bytes in all) while the dense weights are read.
            cap_context: take `n_ctx` as a wish and the model's trained context as its limit.
            outputs: traces to write.
            arguments: fields of `routeahead.Settings`, and what `llama_cpp.Llama` takes.

        Raises:
            ModelError: the file cannot be used.
            SettingsError: settings contradict each other or the cache is too small.
        """
        started = time.perf_counter()
        self.settings, llama = Settings.split(arguments)
        self.layout = read_layout(model_path)
        self.counters = Counters()
        self._read_until: tuple[float, int, int] | None = None  # lanes' totals after a batch
        self.phase: Phase = "prefill"
        trained = self.layout.value("context_length")
        if cap_context and trained:
            llama["n_ctx"] = min(llama["n_ctx"], int(trained))
        if self.settings.resident and outputs != NOTHING:
            raise SettingsError("csv, io_trace and route_trace record streaming: not with resident")
        if not self.settings.resident:
            self._prepare(wrap_reader, poison, outputs)
        try:
            self._load(llama, progress)
        except BaseException:
            self.close()
            raise
        self.counters.load_s = time.perf_counter() - started

    # --- the way in: what llama_cpp.Llama's constructor does not expose ---

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        """The constructor's `self.model_params = llama_model_default_params()` arrives here."""
        params.use_extra_bufts = False  # a repacked weight no longer has the file's layout
        if self.streamed:
            self.streamed.inject_model(params)
        self._model_params = params

    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        if self.streamed:
            self.streamed.inject_context(params)
        self._context_params = params

    # --- loading ---

    def _prepare(self, wrap_reader: WrapReader | None, poison: bool, outputs: Outputs) -> None:
        try:
            self.streamed = StreamedModel(
                self.layout,
                self.settings,
                wrap_reader=wrap_reader,
                poison=poison,
                outputs=outputs,
            )
        except StreamError as error:
            # Without the struct layout that streaming needs, the model is loaded whole, if it fits.
            need, free = self.layout.file_bytes, available_bytes()
            if need > free:
                raise StreamError(
                    f"cannot stream ({error}), and {need // MIB} MiB do not fit in the "
                    f"{free // MIB} MiB that are free"
                ) from error
            warnings.warn(f"cannot stream, so the whole model is loaded: {error}", stacklevel=3)
            self.settings = Settings(resident=True)

    def _load(self, llama: dict[str, Any], progress: Progress | None) -> None:
        if llama.get("n_gpu_layers") or llama.get("use_mlock"):
            raise SettingsError("n_gpu_layers and use_mlock load the experts: leave them out")
        llama.setdefault("verbose", False)
        llama["n_threads"] = llama.get("n_threads") or physical_cores()
        llama["n_threads_batch"] = llama.get("n_threads_batch") or llama["n_threads"]
        llama.setdefault("op_offload", False)
        llama["use_mmap"] = False
        if self.settings.n_expert_used:
            key = f"{self.layout.arch}.expert_used_count"
            overrides = llama.get("kv_overrides") or {}
            llama["kv_overrides"] = {**overrides, key: self.settings.n_expert_used}
        path = FileName(self.layout.shards[0].path)
        try:
            with native_log.errors() as reasons:
                native_abort.guarded(lambda: super(Llama, self).__init__(path, **llama))
        except BaseException as error:
            if self.streamed:
                self.streamed.abandon()
            llamas = (ValueError, RuntimeError, AssertionError, TemplateError)
            if isinstance(error, RouteAheadError) or not isinstance(error, llamas):
                raise
            reason = reasons[0] if reasons else error
            raise ModelError(f"{path}: llama.cpp cannot load it: {reason}") from error
        pieces = functools.partial(detokenize, self._model.vocab, self._model.token_bos())
        self._model.detokenize = pieces  # type: ignore[method-assign]
        if self.streamed:
            self.streamed.start(progress)
            self.layout = self.streamed.layout
        self._plain_decode = self._ctx.decode
        self._ctx.decode = self._decode  # type: ignore[method-assign]

    # --- running ---

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As `llama_cpp.Llama.generate`; declares the prompt prefill, and decode what follows.

        Raises:
            SettingsError: the prompt does not fit in the context.
        """
        if len(tokens) >= self.room:
            raise SettingsError(
                f"the prompt has {len(tokens)} tokens and the context {self.room}: "
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
        phase, streamed, before = self.phase, self.streamed, self._reading()
        if self._read_until:  # a guess may have been read since the last batch: it counts here
            before.io_s, before.bytes_read, before.reads = self._read_until
        if streamed:
            streamed.hook.begin()
            streamed.stream.begin(phase, self.n_tokens)
        try:
            self._plain_decode(batch)
            if streamed:
                streamed.hook.check()
                streamed.stream.end()
        except BaseException:
            self._undo()
            raise
        now = self._reading()
        self._read_until = now.io_s, now.bytes_read, now.reads
        step = now.minus(before)
        step.tokens, step.batches = batch.batch.n_tokens, 1
        self.counters.totals(phase).add(step)
        if streamed:
            streamed.recorder.end_of_batch(phase, step)

    def _undo(self) -> None:
        """After a failed batch: back to the state before it."""
        if self.streamed:
            self.streamed.stream.recover()
        self._requires_eval = True
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            # Recurrent state cannot be cut: start over.
            self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
            self.n_tokens = 0

    def _reading(self) -> Totals:
        """The running totals of everything that a step adds to."""
        now = Totals(wall_s=time.perf_counter(), cpu_s=cpu_s())
        if self.streamed:
            stream, source = self.streamed.stream, self.streamed.stream.source
            now.stall_s, now.mgmt_s = source.stall_s, stream.mgmt_s
            now.adopt_s = source.adopt_s
            now.io_s = source.lanes.busy_s
            now.bytes_read, now.reads = source.lanes.bytes_read, source.lanes.reads
            now.hits, now.misses = source.cache.hits, source.cache.misses
        return now

    @property
    def source(self) -> ExpertSource | None:
        """The expert source; None where the model is resident."""
        return self.streamed.stream.source if self.streamed else None

    @property
    def steering(self) -> Steering:
        """The policies and their helpers, with what they have counted."""
        return self.streamed.stream.steering if self.streamed else Steering()

    @property
    def direct_io(self) -> bool:
        """Whether experts are read past the page cache."""
        return bool(self.streamed and self.streamed.direct_io)

    @property
    def room(self) -> int:
        """Tokens that fit in the context: llama.cpp rounds it up, llama-cpp-python does not."""
        return min(self.n_ctx(), len(self.input_ids))

    @property
    def stops(self) -> int:
        """Calls from the graph into Python so far."""
        return self.streamed.hook.calls if self.streamed else 0

    def close(self) -> None:
        """Frees the context and the model, then stops the lanes."""
        if hasattr(self, "_stack"):
            super().close()
        if self.streamed:
            self.streamed.close()
