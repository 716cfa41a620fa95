"""Everything that a streamed model has and a resident one has not, and how it comes to be."""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import llama_cpp

from routeahead.config import Settings
from routeahead.engine.budget import FIXED_HEADROOM, CacheBudget
from routeahead.engine.checksums import Checksums, Verified, read_checksums, verify_dense
from routeahead.engine.fingerprint import fingerprint
from routeahead.engine.offload import Offload
from routeahead.engine.ownership import Ownership
from routeahead.engine.policies import Policies, make_policies
from routeahead.engine.profile import read_uses, write_uses
from routeahead.engine.stream import Stream
from routeahead.engine.ubatch import DEFAULT, buffer_bytes
from routeahead.engine.window import WINDOW, Window
from routeahead.errors import SettingsError, no_thread
from routeahead.experts.arena import Arena
from routeahead.experts.dense import dense_runs, read_dense
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.experts.reader import FileReader, Reader, Throttled
from routeahead.experts.slots import Slots
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp.eval_callback import EvalCallback
from routeahead.llamacpp.placement import Placement
from routeahead.llamacpp.router_product import check_width
from routeahead.machine.memory import available_bytes
from routeahead.prediction.gates import Gate, check_depth, read_gates
from routeahead.prediction.ranker import RouterRanker
from routeahead.routing.policy import Model, Policy, Precision
from routeahead.telemetry.output_files import check_apart
from routeahead.telemetry.recorder import NOTHING, Outputs, Recorder

Progress = Callable[[int, int], None]
WrapReader = Callable[[Reader], Reader]


@dataclass(frozen=True)
class Hooks:
    """What experiments and tests put into a streamed model; not for use.

    Attributes:
        wrap_reader: puts another reader between the lanes and the disk.
        poison: makes access to an expert that was not provided a crash.
    """

    wrap_reader: WrapReader | None = None
    poison: bool = False


NO_HOOKS = Hooks()


class StreamedModel:
    """Arena, placement, reader, hook, source and stream of one model.

    Made before llama.cpp loads the model, injected into its parameters, started after the load.
    Keep it alive until the model is freed.

    Raises:
        StreamError: the installed library's structs are not laid out as expected.
    """

    stream: Stream
    recorder: Recorder
    budget: CacheBudget

    def __init__(
        self,
        layout: ModelLayout,
        settings: Settings,
        offload: Offload,
        *,
        outputs: Outputs = NOTHING,
        policies: Sequence[Policy] = (),
        hooks: Hooks,
    ) -> None:
        inputs = [("a file of the model", shard.path) for shard in layout.shards]
        if settings.replay_routing:
            inputs.append(("the recorded routing", settings.replay_routing))
        if settings.route_ahead_gates:
            inputs.append(("the calibrated routers", settings.route_ahead_gates))
        check_apart(inputs, outputs.paths)
        self.layout, self._settings, self._outputs = layout, settings, outputs
        self._given = policies
        self._top_k = settings.n_expert_used or layout.n_expert_used
        if self._top_k > layout.n_expert:
            raise SettingsError(f"n_expert_used is {self._top_k}: the model has {layout.n_expert}")
        self._gates: dict[int, Gate] = {}
        if settings.route_ahead_gates:
            gates = read_gates(settings.route_ahead_gates, fingerprint(layout.loaded()))
            self._gates = check_depth(gates, settings.route_ahead, settings.route_ahead_gates)
        self._poison = hooks.poison
        self.ownership = Ownership()
        self.arena = Arena(layout.shards, poison=hooks.poison)
        places = {t.name: self.arena.address(t.shard, t.offset) for t in layout.tensors}
        self._offload = offload
        self._placement = Placement(
            places.get, offload.pattern, others=offload.read_by_llama(layout)
        )
        self.callback = EvalCallback()
        file_reader = FileReader(layout.shards, direct=settings.direct_io)
        if file_reader.fallback:
            warnings.warn(f"reading through the page cache: {file_reader.fallback}", stacklevel=4)
        self.direct_io = file_reader.direct
        reader: Reader = file_reader
        if settings.throttle:
            rate, latency = settings.throttle * MIB, settings.throttle_latency_ms / 1e3
            reader = Throttled(reader, bytes_per_s=rate, latency_s=latency)
        if hooks.wrap_reader:
            reader = hooks.wrap_reader(reader)
        self._sums: Checksums | None = None
        if settings.verify_reads:
            self._sums = read_checksums(layout)
            reader = Verified(reader, layout, self._sums)
        self._reader = reader
        self._closers = contextlib.ExitStack()
        self._closers.callback(self._reader.close)
        # Also runs before the interpreter exits: later, threads no longer run, and a model that
        # nobody closed would wait for its lanes for ever.
        self._finalizer = weakref.finalize(self, self._closers.close)
        _all.add(self)

    def inject_model(self, params: Any) -> None:
        self._placement.inject(params)

    def inject_context(self, params: Any) -> None:
        params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(self.callback.function)
        params.cb_eval_user_data = self.callback.user_data
        params.abort_callback = llama_cpp.ggml_abort_callback(self.callback.abort_function)
        params.abort_callback_data = self.callback.user_data

    def abandon(self) -> None:
        """The load failed."""
        self._placement.finish(loaded=False)

    def start(
        self, progress: Progress | None, unannounced: Callable[[int], None], context: Any
    ) -> None:
        """The model and its context exist: reads the dense weights, starts the lanes.

        `unannounced` is called as `EvalCallback.attach` says; `context` are its parameters.

        Raises:
            ReadError: the dense weights cannot be read.
            SettingsError: the cache is too small, or there is no room for one.
        """
        self._placement.finish(loaded=True)
        # llama.cpp skips tensors it has no use for (multi-token prediction layers): so do we.
        tensors = self._placement.tensors
        ours = [t for t in self.layout.tensors if t.name in tensors]
        placed = ModelLayout(self.layout.shards, ours, self.layout.metadata)
        if self._settings.dense == "anon":
            read_dense(placed.dense, self.arena, self._reader, progress=progress)
        else:
            self._map_dense(placed)
        if self._sums:
            verify_dense(placed, placed.dense, self.arena, self._sums)
        # What llama.cpp read itself, to a device or beside it, counts as used.
        own = re.compile(self._offload.pattern)
        theirs = {t.name for t in self.layout.loaded().tensors if not own.search(t.name)}
        used = [t for t in self.layout.tensors if t.name in tensors or t.name in theirs]
        self.layout = layout = ModelLayout(self.layout.shards, used, self.layout.metadata)
        source = ExpertSource(
            layout,
            Slots(layout.experts, poison=self._poison),
            self._reader,
            lanes=self._settings.io_threads,
            bind=self._placement.bind,
            cache_policy=self._settings.cache_policy,
        )
        self._closers.callback(source.close)
        window = self._make_window(source, context)
        self.budget = self._make_budget(source, window)
        self._closers.callback(self.budget.close)
        source.cache.budget = self.budget.now
        preamble = {**_versions(), "model": str(layout.shards[0].path), **self._settings.as_dict()}
        self.recorder = Recorder(self._outputs, layout, self._top_k, preamble)
        self._closers.callback(self.recorder.close)
        if self.recorder.io:
            source.lanes.records = self.recorder.io.records
        try:
            policies = self._make_policies(source)
        except RuntimeError as error:  # of `Thread.start`
            if "thread" not in str(error):
                raise
            raise no_thread("predictions") from None
        self._closers.callback(policies.close)
        moe_layers = layout.moe_layers
        shown = policies.wants_hidden or policies.before_attention
        hidden = self.callback.router_input(moe_layers) if shown else None
        self.stream = Stream(
            source,
            {tensors[e.name]: e for e in layout.experts},
            n_expert=layout.n_expert,
            overlap=self._settings.overlap,
            graph=self.callback,
            policies=policies,
            window=window,
            ownership=self.ownership,
            hidden=hidden,
            log=self.recorder.routes,
        )
        self.callback.attach(
            self.stream,
            unannounced=unannounced,
            tracing=self.recorder.routes is not None,
            weighing=moe_layers if policies.weighted else (),
            offloaded=self._offload.layers > 0,
            late=not policies and self.recorder.routes is None,
        )
        if self._settings.fill_cache:
            uses = read_uses(layout)
            self._closers.callback(write_uses, layout, uses)
            source.fill(uses)
        self.budget.watch()

    def _make_window(self, source: ExpertSource, context: Any) -> Window:
        layout, given, size = self.layout, self._settings.n_expert_used, self._settings.cache_mb
        sizes = {tensor.layer: tensor.n_expert for tensor in layout.experts}
        experts = {n: (sizes[n], given or layout.top_k(n)) for n in layout.moe_layers}
        flash = context.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED

        def buffer(rows: int) -> int:
            """Bytes of compute buffer beyond what any context has."""
            more, few = (
                buffer_bytes(layout, n, context.n_ctx, flash_attention=flash)
                for n in (rows, DEFAULT)
            )
            return max(0, more - few)

        room = available_bytes() - layout.layer_bytes() - buffer(context.n_ubatch)
        spare = room // 8 if size == "auto" else room - size * MIB - FIXED_HEADROOM
        source.window = max(0, min(layout.layer_bytes(), WINDOW, spare))
        if size != "auto":  # 'auto' leaves room for a layer; who chose a size may have none
            beside = layout.layer_bytes() + min(0, spare - FIXED_HEADROOM)
            source.cache.spare = max(0, beside) if size * MIB < layout.expert_bytes else 0
        return Window(source, experts, ubatch=context.n_ubatch, buffer=buffer)

    def _make_policies(self, source: ExpertSource) -> Policies:
        layout, layers = self.layout, self.layout.moe_layers
        width = int(layout.value("embedding_length") or 0)
        check_width(self._settings.router_precision, width)

        def ranker(precision: Precision) -> RouterRanker:
            return RouterRanker(self.callback.router_input(layers), precision, self._gates)

        top_ks = {} if self._settings.n_expert_used else {n: layout.top_k(n) for n in layers}
        model = Model(
            layers, layout.n_expert, self._top_k, width, source, ranker, top_k_by_layer=top_ks
        )
        return make_policies(self._settings, model, self._given)

    def _map_dense(self, layout: ModelLayout) -> None:
        for shard, start, end in dense_runs(layout.dense):
            with self.layout.shards[shard].path.open("rb") as file:
                self.arena.map_file(shard, start, end, file.fileno())

    def _make_budget(self, source: ExpertSource, window: Window) -> CacheBudget:
        """Dense weights, KV cache and context exist by now: what is free is free for experts."""
        layout, settings, size = self.layout, self._settings, self._settings.cache_mb
        least = layout.token_bytes(settings.n_expert_used)
        if size != "auto" and 0 < size * MIB < least and not settings.force_cache:
            raise SettingsError(
                f"cache_mb={size} is less than one token routes to: give at least "
                f"{-(-least // MIB)}, or 0 for none, or force it with force_cache"
            )
        # A prompt may take one layer beyond the budget; so may what is read before its layer asks.
        # Who chooses a size has chosen the latter, too, and a layer that is larger than the cache,
        # but not what stands beside the cache in prompts, nor their compute buffer.
        ahead = settings.route_ahead or settings.prefetch or int(settings.predict_prefetch)
        of_row = self._top_k + max(0, settings.route_ahead_candidates or 0)
        each = min(layout.n_expert, of_row * (1 + settings.lookup))  # of a layer
        early = min(math.ceil(ahead), len(layout.moe_layers)) * each * layout.largest_expert()
        return CacheBudget(
            source.cache,
            None if size == "auto" else size * MIB,
            whole=layout.expert_bytes,
            token=least,
            floor=max(least, (settings.cache_floor_mb or 0) * MIB),
            beside=source.window
            + window.buffer(window.ubatch)
            + (layout.layer_bytes() + early if size == "auto" else source.cache.spare),
            held=lambda: source.held + window.buffer(window.most),
            short=source.lanes.pause,
            resize=source.resize,
            ownership=self.ownership,
        )

    def adjust(self) -> None:
        """Before a batch: takes the cache, and gives it the size that memory has room for."""
        self.ownership.take()
        self.budget.adjust()

    def close(self) -> None:
        """Stops the lanes and gives all memory back. llama.cpp must have freed the model."""
        self._finalizer()
        self.arena.close()
        self._placement.close()

    def forked(self) -> None:
        """In a child process, after a fork: lanes, traces and workers are the parent's."""
        self._finalizer.detach()
        self.ownership.forked()
        if "stream" in vars(self):
            self.stream.source.lanes.forked()


_all: weakref.WeakSet[StreamedModel] = weakref.WeakSet()


def _after_fork() -> None:
    for model in list(_all):
        model.forked()


os.register_at_fork(after_in_child=_after_fork)


def _versions() -> dict[str, str]:
    return {"routeahead": version("routeahead"), "llama_cpp_python": llama_cpp.__version__}
