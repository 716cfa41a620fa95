"""The composition root: a `llama_cpp.Llama` whose experts stay on disk."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel

from routeahead.config import Settings
from routeahead.engine.keywords import signature, split
from routeahead.engine.loading import Loading
from routeahead.engine.policies import Policies
from routeahead.engine.speculation import Drafts, Unverified
from routeahead.engine.starved import Starved
from routeahead.engine.streamed_model import NO_HOOKS, Hooks, Progress
from routeahead.engine.ubatch import DEFAULT
from routeahead.errors import ModelError, SettingsError, UseError
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.native_log import Buffers
from routeahead.routing.policy import Policy
from routeahead.telemetry.counters import Counters, Totals, cpu_s
from routeahead.telemetry.recorder import NOTHING, Outputs
from routeahead.types import Phase

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from routeahead.engine.arguments import Arguments


def _phase(rows: int, position: int) -> Phase:
    """What a batch is if nobody says: one row after others is a decode."""
    return "decode" if rows == 1 and position > 0 else "prefill"


class Llama(Loading):
    """A `llama_cpp.Llama` that leaves the experts on disk and reads them as tokens route to them.

        llm = Llama("model.gguf", n_ctx=4096, cache_mb=4000)

    Whatever accepts a llama-cpp-python model accepts this one. Calls of several threads run one
    after the other (`engine.turns` says how streams share a model), and a child process that was
    forked cannot use it. Pickling or copying one gives a model that is loaded anew with the same
    settings.

    After `close`, whatever needs the model raises `UseError`.

    Usually set are `cache_mb` (memory for experts, in MiB; "auto" takes what is free), `n_ctx`,
    `n_threads` and `io_threads` (threads that read). Further keywords are the fields of
    `routeahead.Settings`, and what `llama_cpp.Llama` takes, with its defaults but for `verbose`,
    which is off, and `n_threads`, which is the number of cores. `use_mmap`, `use_mlock` and, on a
    build without a GPU, `n_gpu_layers` have no effect. A model without experts is loaded whole.
    `n_gpu_layers` puts dense weights on a device (docs/gpu.md), also of a resident model.

    Attributes:
        settings: the streaming settings, validated.
        layout: where the model's tensors lie.
        streamed: the streaming parts; None if the model is resident.
        offload: which layers are on a device.
        buffers: what llama.cpp allocated, in host memory and on devices.
        counters: what has been counted since the load, of all batches that came through this class.
        phase: what the next batch is; None lets its size tell, which is right unless a prompt's
            last row comes alone. `generate` declares it, and direct callers of `eval` may.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        policies: Sequence[Policy] = (),
        outputs: Outputs = NOTHING,
        progress: Progress | None = None,
        cap_context: bool = False,
        _hooks: Hooks = NO_HOOKS,
        **arguments: Unpack[Arguments],
    ) -> None:
        """
        Loads a model.

        Args:
            policies: policies of your own, after the built-in ones (docs/policy-api.md).
            outputs: traces to write.
            progress: called with (bytes, bytes in all) while the dense weights are read.
            cap_context: take `n_ctx` as a wish and the model's trained context as its limit.
            arguments: see the class.

        Raises:
            TypeError: a keyword is unknown.
            ModelError: the file cannot be used.
            SettingsError: settings contradict each other or the cache is too small.
            StreamError: the model cannot be streamed, and does not fit as a whole.
        """
        started = time.perf_counter()
        self._cannot_travel = bool(policies) or outputs != NOTHING or _hooks != NO_HOOKS
        self.settings, llama = split(arguments)
        self.layout = read_layout(model_path)
        self.counters = Counters()
        self.buffers = Buffers({}, {})
        self._read_until: tuple[float, int, int] | None = None  # lanes' totals after a batch
        self._starved = Starved()
        self.phase: Phase | None = None
        self._evaluating = self._void = False
        self._prompt_end = 0  # where the prompt that is being evaluated will end
        self._unwanted: Callable[[], bool] | None = None
        trained = self.layout.value("context_length")
        if cap_context and trained:
            llama["n_ctx"] = min(llama.get("n_ctx") or int(trained), int(trained))
        if self.settings.resident and (outputs != NOTHING or policies):
            raise SettingsError(
                "csv, io_trace, route_trace and policies are about streaming: not with resident"
            )
        if self.settings.resident and self.layout.packed:
            raise SettingsError(
                f"{model_path}: resident: llama.cpp cannot load a packed file: give the file that "
                "it was made from, or stream it"
            )
        if llama.get("vocab_only"):
            self.settings = Settings(resident=True)  # there are no weights to stream
        self.offload = self._plan_offload(llama)
        if not self.settings.resident:
            self._prepare(outputs, policies, _hooks)
        try:
            drafts = self._load(llama)
            self._start(progress, drafts)
        except BaseException:
            self.close()
            raise
        self.counters.load_s = time.perf_counter() - started

    def _start(self, progress: Progress | None, drafts: LlamaDraftModel | None) -> None:
        """llama.cpp has the model: reads the dense weights, and has every batch come by here."""
        if self.streamed:
            this = weakref.proxy(self)  # what llama.cpp calls must not keep the model alive
            unannounced = lambda rows: this._unannounced(rows)  # noqa: E731, PLW0108
            self.streamed.start(progress, unannounced, self.context_params)
            self.layout = self.streamed.layout
        self._plain_decode = self._ctx.decode
        decode = weakref.WeakMethod(self._decode)  # a cycle would outlive `del`

        def counted(batch: Any) -> None:
            method = decode()
            if method is None:
                raise UseError("this model is gone: keep the Llama as long as its context")
            method(batch)

        self._ctx.decode = counted  # type: ignore[method-assign]
        if drafts:
            self.draft_model = Drafts(drafts, self)

    def _generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Declares the prompt prefill, and decode what follows.

        Raises:
            SettingsError: the prompt does not fit in the context.
        """
        if len(tokens) >= self.room:
            raise SettingsError(
                f"the prompt has {len(tokens)} tokens and the context {self.room}: "
                "shorten the prompt or raise n_ctx (-c)"
            )
        if self._void:
            self._undo()
        inner = super()._generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        phase: Phase = "prefill"
        unverified = Unverified(self)
        while True:
            outer, self.phase = self.phase, phase
            self._verifying = phase == "decode"
            try:
                token = inner.send(sent)
            except StopIteration:
                return
            finally:
                self.phase = outer  # for what others evaluate while this generator rests
                self._verifying = False
            unverified.hide(token)
            sent = yield token
            unverified.show()
            phase = "decode"

    def _eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`. One token after others is a decode, anything else prefill,
        unless `phase` or `decoding` says otherwise.

        Raises:
            ReadError: an expert's bytes did not arrive. The failed batch left no trace.
            ModelError: the model keeps nothing of a token for the next one (encoders, diffusion).
        """
        if self._ctx.memory is None:
            raise ModelError(
                f"{self.layout.shards[0].path}: {self.layout.arch} has no KV cache, so it cannot "
                "generate text token by token: use Llama(..., embedding=True).embed(text)"
            )
        if self._void:
            self._undo()
        outer = self.phase, self._prompt_end
        self.phase = self.phase or _phase(len(tokens), self.n_tokens)
        # llama-cpp-python cuts it into batches.
        self._prompt_end = max(self._prompt_end, self.n_tokens + len(tokens))
        try:
            super()._eval(tokens)
        finally:
            self.phase, self._prompt_end = outer

    @contextlib.contextmanager
    def prompt(self, end: int) -> Generator[None]:
        """In its block, prefill is a part of a prompt whose end is position `end`.

        A prompt may so be evaluated by several calls of `eval` or `generate`, and what the next
        one needs is read meanwhile. If none comes, that costs those reads: what they brought is
        forgotten when another batch has passed over their layers.
        """
        outer, self._prompt_end = self._prompt_end, end
        try:
            yield
        finally:
            self._prompt_end = outer

    @contextlib.contextmanager
    def stopping(self, unwanted: Callable[[], bool]) -> Generator[None]:
        """In its block, a long batch of a streamed model ends with `Stopped` if `unwanted()`.

        That is asked at each layer of batches of more than `ubatch.DEFAULT` rows. What ends leaves
        no trace, but costs the expert cache, as an interrupt does: shorter ones come to their end.
        """
        outer, self._unwanted = self._unwanted, unwanted
        try:
            yield
        finally:
            self._unwanted = outer

    @contextlib.contextmanager
    def decoding(self) -> Generator[None]:
        """In its block, all that is evaluated directly counts as decode, however many tokens.

        Settings that change the routing of decoded tokens alone, such as `route_ahead`, apply.
        """
        outer, self.phase = self.phase, "decode"
        try:
            yield
        finally:
            self.phase = outer

    def check(self) -> None:
        """Raises what a failed `llama_decode(llm.ctx, ...)` could not: it only returned 2.

        Everything that evaluates through this class calls it first. The exception is kept until
        then, or until the next batch that `llama_decode` is given.

        Raises:
            BaseException: a `ReadError`, say, or the `KeyboardInterrupt` of a Ctrl-C.
        """
        if self.streamed and self.streamed.callback.void:
            self.streamed.stream.recover()
            self.streamed.callback.check()

    def _unannounced(self, rows: int) -> None:
        """A batch begins that was given to `llama_decode` directly, or a ubatch of such a batch.

        Called at the top-k of its first MoE layer, which routes `rows`.
        """
        streamed = self.streamed
        assert streamed
        if streamed.callback.void:  # the client was told, and goes on
            streamed.stream.recover()
        last = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self.ctx), 0)
        first = max(0, last + 1 - rows)
        self.serial += 1
        streamed.stream.begin(self.phase or _phase(rows, first), first)
        self._read_until = None  # its reads are in nobody's totals

    def _decode(self, batch: Any) -> None:
        """Runs one batch, counts it, and turns a fault inside the graph into an exception.

        Raises:
            ReadError: an expert's bytes did not arrive. The batch left no trace in the context.
        """
        if self._evaluating:
            raise UseError("a batch was evaluated inside another one, by a policy or a signal")
        self._evaluating = True
        try:
            self.check()
            self._run(batch)
        finally:
            self._evaluating = False

    def _run(self, batch: Any) -> None:
        phase, streamed, before = self.phase or "prefill", self.streamed, self._reading()
        if self._read_until:  # a guess may have been read since the last batch: it counts here
            before.io_s, before.bytes_read, before.reads = self._read_until
        if self._void and streamed:  # not by way of `eval`
            streamed.callback.forget()
            streamed.stream.recover()
        # A second interrupt may cut `_undo` short, or arrive before its first line: then it is done
        # before anything else is evaluated, and until then no logits count.
        self._void = self._requires_eval = True
        rows = self._number(batch)
        try:
            if streamed:
                streamed.adjust()
                streamed.callback.begin()
                streamed.stream.unwanted = self._unwanted if rows > DEFAULT else None
                more = max(self._prompt_end - self.n_tokens, rows)
                streamed.stream.begin(phase, self.n_tokens, more, whole=self._all_output)
            self._plain_decode(batch)
            if streamed:
                streamed.callback.check()
                streamed.stream.end()
            self._void = False
        except BaseException:
            self._undo()
            raise
        now = self._reading()
        self._read_until = now.io_s, now.bytes_read, now.reads
        step = now.minus(before)
        step.tokens, step.batches = rows, 1
        if self._verifying and rows > 1:
            step.drafted, step.drafts, step.draft_bytes = rows - 1, 1, step.bytes_read
        if self.n_threads > 1:
            self._starved.add(phase, step)
        self.counters.totals(phase).add(step)
        if streamed:
            streamed.recorder.end_of_batch(phase, step)

    def accepted(self) -> None:
        """A guess of the last batch was right."""
        self.counters.decode.accepted += 1
        if self.streamed:
            self.streamed.recorder.accepted()

    def _undo(self) -> None:
        """After a failed batch: back to the state before it."""
        if self._ctx.memory is None:
            self.n_tokens = 0
        elif not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            # Recurrent state cannot be cut: start over.
            self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
            self.n_tokens = 0
        if self.streamed:
            self.streamed.callback.forget()
            self.streamed.stream.recover()
        self._void = False

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
            now.evictions, now.rereads = source.cache.evictions, source.cache.rereads
            now.early_bytes = source.lanes.early_bytes
            for policy in stream.policies.count:
                policy.count(now)
        return now

    @property
    def _all_output(self) -> bool:
        """Whether each row of a batch has an output, and not the last one alone."""
        return bool(self._verifying or self._logits_all or self.context_params.embeddings)

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

    def _release(self) -> None:
        vars(self).pop("_plain_decode", None)
        try:
            super()._release()
        finally:
            if self.streamed:
                self.streamed.close()


Llama.__init__.__signature__ = signature(  # type: ignore[attr-defined]
    Llama.__init__, own=("policies", "outputs", "progress", "cap_context")
)
