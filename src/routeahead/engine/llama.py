"""The composition root: a `llama_cpp.Llama` whose experts stay on disk."""

from __future__ import annotations

import inspect
import os
import time
import warnings
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import llama_cpp

from routeahead.config import Settings
from routeahead.engine.policies import Policies
from routeahead.engine.starved import Starved
from routeahead.engine.streamed_model import Progress, StreamedModel, WrapReader
from routeahead.engine.turns import Closed, Turns
from routeahead.errors import ModelError, SettingsError, StreamError, UseError
from routeahead.experts.layout import MIB
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp import native_abort, native_log
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.machine.memory import available_bytes
from routeahead.routing.policy import Policy
from routeahead.telemetry.counters import Counters, Totals, cpu_s
from routeahead.telemetry.recorder import NOTHING, Outputs
from routeahead.types import Phase

# What `llama_cpp.Llama` takes: other keywords are misspelt.
_LLAMA_ARGUMENTS = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters) - {
    "self",
    "kwargs",
}


class Llama(llama_cpp.Llama):
    """Takes everything that `llama_cpp.Llama` takes, and the streaming settings.

    Whatever accepts a llama-cpp-python model accepts this one. Calls of several threads run one
    after the other (`engine.turns` says how streams share a model), and a child process that was
    forked cannot use it. Pickling or copying one gives a model that is loaded anew with the same
    settings.

    After `close`, whatever needs the model raises `UseError`.

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
        policies: Sequence[Policy] = (),
        **arguments: Any,
    ) -> None:
        """
        Args:
            wrap_reader: puts another reader between the lanes and the disk (experiments, tests).
            poison: makes access to an expert that was not provided a crash (tests).
            progress: called with (bytes, bytes in all) while the dense weights are read.
            cap_context: take `n_ctx` as a wish and the model's trained context as its limit.
            outputs: traces to write.
            policies: policies of your own, after the built-in ones (docs/policy-api.md).
            arguments: fields of `routeahead.Settings`, and what `llama_cpp.Llama` takes.

        Raises:
            ModelError: the file cannot be used.
            SettingsError: settings contradict each other or the cache is too small.
        """
        started = time.perf_counter()
        self._turns = Turns()
        self._cannot_travel = (wrap_reader, policies) != (None, ()) or outputs != NOTHING
        self.settings, llama = Settings.split(arguments, _LLAMA_ARGUMENTS)
        self.layout = read_layout(model_path)
        self.counters = Counters()
        self._read_until: tuple[float, int, int] | None = None  # lanes' totals after a batch
        self._starved = Starved()
        self.phase: Phase = "prefill"
        self._decoding = False
        trained = self.layout.value("context_length")
        if cap_context and trained:
            llama["n_ctx"] = min(llama.get("n_ctx") or int(trained), int(trained))
        if self.settings.resident and (outputs != NOTHING or policies):
            raise SettingsError(
                "csv, io_trace, route_trace and policies are about streaming: not with resident"
            )
        if not self.settings.resident:
            self._prepare(wrap_reader, poison, outputs, policies)
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

    def _prepare(
        self,
        wrap_reader: WrapReader | None,
        poison: bool,
        outputs: Outputs,
        policies: Sequence[Policy],
    ) -> None:
        try:
            self.streamed = StreamedModel(
                self.layout,
                self.settings,
                wrap_reader=wrap_reader,
                poison=poison,
                outputs=outputs,
                policies=policies,
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
        llama["n_threads"] = llama.get("n_threads") or default_threads()
        llama["n_threads_batch"] = llama.get("n_threads_batch") or llama["n_threads"]
        llama.setdefault("op_offload", False)
        llama["use_mmap"] = False
        if self.settings.n_expert_used:
            if isinstance(self.layout.value("expert_used_count"), list):
                raise SettingsError(
                    "n_expert_used: this model has a number of its own for each layer, which "
                    "llama.cpp does not replace: leave n_expert_used out"
                )
            key = f"{self.layout.arch}.expert_used_count"
            overrides = llama.get("kv_overrides") or {}
            llama["kv_overrides"] = {**overrides, key: self.settings.n_expert_used}
        path = str(self.layout.shards[0].path)
        try:
            with native_log.errors() as reasons:
                native_abort.guarded(lambda: super(Llama, self).__init__(path, **llama))
        except BaseException as error:
            if self.streamed:
                self.streamed.abandon()
            if not isinstance(error, (ValueError, RuntimeError)):
                raise
            wanted = self.settings.n_expert_used or 0
            if isinstance(error, native_abort.NativeAbort) and wanted > self.layout.n_expert_used:
                raise SettingsError(
                    f"n_expert_used={wanted}: llama.cpp's graph has no room for so many in this "
                    f"model ({error}): give fewer"
                ) from error
            reason = reasons[0] if reasons else error
            raise ModelError(f"{path}: llama.cpp cannot load it: {reason}") from error
        if self.streamed:
            self.streamed.start(progress)
            self.layout = self.streamed.layout
        self._plain_decode = self._ctx.decode
        decode = weakref.WeakMethod(self._decode)  # a cycle would outlive `del`

        def counted(batch: Any) -> None:
            method = decode()
            if method is None:
                raise UseError("this model is gone: keep the Llama as long as its context")
            method(batch)

        self._ctx.decode = counted  # type: ignore[method-assign]

    # --- running ---

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As `llama_cpp.Llama.generate`; declares the prompt prefill, and decode what follows.

        Raises:
            SettingsError: the prompt does not fit in the context.
            UseError: another thread used the model between two tokens.
        """
        return self._turns.stream(self._generate(tokens, *args, **kwargs))

    def _generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        if len(tokens) >= self.room:
            raise SettingsError(
                f"the prompt has {len(tokens)} tokens and the context {self.room}: "
                "shorten the prompt or raise n_ctx (-c)"
            )
        inner = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        while True:
            try:
                token = inner.send(sent)
            except StopIteration:
                return
            finally:
                self.phase = "prefill"  # what others evaluate while this generator rests
            sent = yield token
            self.phase = "decode"

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """As llama-cpp-python's, but what it makes of a logits processor, which is part of a cycle,
        does not keep this object alive."""
        this: Any = weakref.proxy(self)
        return llama_cpp.Llama._init_sampler(this, *args, **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`.

        Raises:
            ModelError: the model keeps nothing of a token for the next one (encoders, diffusion).
        """
        if self._ctx.memory is None:
            raise ModelError(
                f"{self.layout.shards[0].path}: {self.layout.arch} has no KV cache, so it cannot "
                "generate text token by token: use Llama(..., embedding=True).embed(text)"
            )
        self._turns.call(super().eval, tokens)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As `llama_cpp.Llama.sample`."""
        return int(self._turns.call(super().sample, *args, **kwargs))

    def reset(self) -> None:
        """As `llama_cpp.Llama.reset`."""
        self._turns.call(super().reset)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.embed`."""
        return self._turns.call(super().embed, *args, **kwargs)

    def save_state(self) -> llama_cpp.LlamaState:
        """The context's tokens and KV cache, for `load_state`.

        Another instance of the same model with the same `n_ctx` and `n_batch` can load it, whatever
        its streaming settings: what the expert cache holds is no part of it.
        """
        return self._turns.call(super().save_state)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Continues where the state was saved, by this instance or another one."""
        self._turns.call(super().load_state, state)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.create_completion`; without `stream`, other calls wait for it."""
        return self._turns.call(super().create_completion, *args, **kwargs)

    def _decode(self, batch: Any) -> None:
        """Runs one batch, counts it, and turns a fault inside the graph into an exception.

        Raises:
            ReadError: an expert's bytes did not arrive. The batch left no trace in the context.
        """
        if self._decoding:
            raise UseError("a batch was evaluated inside another one, by a policy or a signal")
        self._decoding = True
        try:
            self._run(batch)
        finally:
            self._decoding = False

    def _run(self, batch: Any) -> None:
        phase, streamed, before = self.phase, self.streamed, self._reading()
        if self._read_until:  # a guess may have been read since the last batch: it counts here
            before.io_s, before.bytes_read, before.reads = self._read_until
        try:
            if streamed:
                streamed.adjust()
                streamed.callback.begin()
                streamed.stream.begin(phase, self.n_tokens)
            self._plain_decode(batch)
            if streamed:
                streamed.callback.check()
                streamed.stream.end()
        except BaseException:
            self._undo()
            raise
        now = self._reading()
        self._read_until = now.io_s, now.bytes_read, now.reads
        step = now.minus(before)
        step.tokens, step.batches = batch.batch.n_tokens, 1
        if self.n_threads > 1:
            self._starved.add(phase, step)
        self.counters.totals(phase).add(step)
        if streamed:
            streamed.recorder.end_of_batch(phase, step)

    def _undo(self) -> None:
        """After a failed batch: back to the state before it."""
        self._requires_eval = True
        if self._ctx.memory is None:
            self.n_tokens = 0
        elif not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            # Recurrent state cannot be cut: start over.
            self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
            self.n_tokens = 0
        if self.streamed:
            self.streamed.stream.recover()

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
    def policies(self) -> Policies:
        """The policies, with what they have counted; empty if the model is resident."""
        return self.streamed.stream.policies if self.streamed else Policies()

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
        return self.streamed.callback.calls if self.streamed else 0

    def __getstate__(self) -> dict[str, Any]:
        """What loads the model anew: `llama_cpp.Llama`'s arguments, and the streaming settings.

        Raises:
            UseError: it was given policies, traces or a reader, which are not copied.
        """
        if self._cannot_travel:
            raise UseError(
                "a model that was given policies=, outputs= or wrap_reader= cannot be pickled or "
                "copied: load it again"
            )
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("use_mmap", "use_mlock", "n_gpu_layers"):  # always off
            del state[name]
        plain = vars(Settings())
        return state | {k: v for k, v in vars(self.settings).items() if v != plain[k]}

    def close(self) -> None:
        """Gives back memory, threads and descriptors; waits for the call that runs now.

        In a child process after a fork it does nothing.

        Raises:
            UseError: it is called inside another call of this model.
        """
        turns = self.__dict__.get("_turns")  # None: the constructor had not begun
        if turns and not turns.forked:
            turns.call(self._close)

    def _close(self) -> None:
        if self._turns.nested:
            raise UseError("a model cannot be closed inside a call of it")
        self._sampler = None
        vars(self).pop("_plain_decode", None)
        try:
            if hasattr(self, "_stack"):
                super().close()
        finally:
            if self.streamed:
                self.streamed.close()
        closed: Any = Closed()
        self._ctx = self._model = self._batch = self.tokenizer_ = closed
        if "scores" in vars(self):
            self.scores = self.scores[:0].copy()
