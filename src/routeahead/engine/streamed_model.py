"""Everything that a streamed model has and a resident one has not, and how it comes to be."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import llama_cpp

from routeahead.config import Settings
from routeahead.engine.memory import available_bytes
from routeahead.engine.policies import steer
from routeahead.engine.stream import Stream
from routeahead.errors import ModelError, SettingsError
from routeahead.experts.arena import Arena
from routeahead.experts.dense import dense_runs, read_dense
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.experts.reader import FileReader, Reader, Throttled
from routeahead.experts.slots import Slots
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp.eval_callback import GraphHook
from routeahead.llamacpp.placement import Placement
from routeahead.telemetry.recorder import NOTHING, Outputs, Recorder

Progress = Callable[[int, int], None]
WrapReader = Callable[[Reader], Reader]

# Left free by an automatic cache: llama.cpp's compute buffers, Python, the kernel.
_HEADROOM = 256 * MIB


class StreamedModel:
    """Arena, placement, reader, hook, source and stream of one model.

    Made before llama.cpp loads the model, injected into its parameters, started after the load.
    Keep it alive until the model is freed.

    Raises:
        ModelError: there is nothing to stream.
        StreamError: the installed library's structs are not laid out as expected.
    """

    stream: Stream
    recorder: Recorder

    def __init__(
        self,
        layout: ModelLayout,
        settings: Settings,
        *,
        wrap_reader: WrapReader | None = None,
        poison: bool = False,
        outputs: Outputs = NOTHING,
    ) -> None:
        if not layout.experts:
            raise ModelError(
                f"{layout.shards[0].path}: has no experts ({layout.arch}), so there is nothing to "
                "stream; --resident runs it"
            )
        self.layout, self._settings, self._outputs = layout, settings, outputs
        self._top_k = settings.n_expert_used or layout.n_expert_used
        if self._top_k > layout.n_expert:
            raise SettingsError(f"n_expert_used is {self._top_k}: the model has {layout.n_expert}")
        self.arena, self._poison = Arena(layout.shards, poison=poison), poison
        places = {t.name: self.arena.address(t.shard, t.offset) for t in layout.tensors}
        self._placement = Placement(places.__getitem__)
        self.hook = GraphHook()
        file_reader = FileReader(layout.shards, direct=settings.direct_io)
        if file_reader.fallback:
            warnings.warn(f"reading through the page cache: {file_reader.fallback}", stacklevel=4)
        self.direct_io = file_reader.direct
        reader: Reader = file_reader
        if settings.throttle:
            rate, latency = settings.throttle * MIB, settings.throttle_latency_ms / 1e3
            reader = Throttled(reader, bytes_per_s=rate, latency_s=latency)
        self._reader = wrap_reader(reader) if wrap_reader else reader
        self._closers = contextlib.ExitStack()
        self._closers.callback(self._reader.close)
        # Also runs before the interpreter exits: later, threads no longer run, and a model that
        # nobody closed would wait for its lanes for ever.
        self._finalizer = weakref.finalize(self, self._closers.close)

    def inject_model(self, params: Any) -> None:
        self._placement.inject(params)

    def inject_context(self, params: Any) -> None:
        params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(self.hook.callback)
        params.cb_eval_user_data = self.hook.user_data

    def abandon(self) -> None:
        """The load failed."""
        self._placement.finish(loaded=False)

    def start(self, progress: Progress | None) -> None:
        """The model and its context exist: reads the dense weights, starts the lanes.

        Raises:
            ReadError: the dense weights cannot be read.
            SettingsError: the cache is too small, or there is no room for one.
        """
        self._placement.finish(loaded=True)
        # llama.cpp skips tensors it has no use for (multi-token prediction layers): so do we.
        tensors = self._placement.tensors
        used = [t for t in self.layout.tensors if t.name in tensors]
        self.layout = layout = ModelLayout(self.layout.shards, used, self.layout.metadata)
        if self._settings.dense == "anon":
            read_dense(layout.dense, self.arena, self._reader, progress=progress)
        else:
            self._map_dense()
        slots = Slots(layout.experts, poison=self._poison)
        source = ExpertSource(
            layout,
            slots,
            self._reader,
            lanes=self._settings.io_threads,
            bind=self._placement.bind,
        )
        self._closers.callback(source.close)
        source.cache.budget = self._budget()
        preamble = {**_versions(), "model": str(layout.shards[0].path), **self._settings.as_dict()}
        self.recorder = Recorder(self._outputs, layout, self._top_k, preamble)
        self._closers.callback(self.recorder.close)
        if self.recorder.io:
            source.lanes.records = self.recorder.io.records
        steering = steer(self._settings, layout, self._top_k, self.hook, source)
        self._closers.callback(steering.close)
        self.stream = Stream(
            source,
            {tensors[e.name]: e for e in layout.experts},
            overlap=self._settings.overlap,
            graph=self.hook,
            steering=steering,
            log=self.recorder.routes,
        )
        self.hook.attach(
            self.stream,
            tracing=self.recorder.routes is not None,
            weighing=layout.moe_layers if steering.drop else (),
        )

    def _map_dense(self) -> None:
        for shard, start, end in dense_runs(self.layout.dense):
            with self.layout.shards[shard].path.open("rb") as file:
                self.arena.map_file(shard, start, end, file.fileno())

    def _budget(self) -> int:
        """Cache size in bytes."""
        layout, size = self.layout, self._settings.cache_mb
        least = layout.token_bytes(self._top_k)
        if size == "auto":
            # Dense weights, KV cache and context exist by now, so what is free is free for experts
            # except for one layer that a prompt may take beyond the budget, and for what is read
            # before its layer asks.
            settings = self._settings
            ahead = settings.route_ahead or settings.prefetch or int(settings.predict_prefetch)
            early = min(ahead, len(layout.moe_layers)) * self._top_k * layout.largest_expert()
            free = available_bytes() - _HEADROOM - layout.layer_bytes() - early
            if free < least:
                raise SettingsError(
                    f"{max(0, free) // MIB} MiB are left for the expert cache and one token routes "
                    f"to {-(-least // MIB)} MiB: use a smaller context, or cache_mb=0"
                )
            return min(free, layout.expert_bytes)
        budget = size * MIB
        if 0 < budget < least and not self._settings.force_cache:
            raise SettingsError(
                f"cache_mb={size} is less than one token routes to: give at least "
                f"{-(-least // MIB)}, or 0 for none, or force it with force_cache"
            )
        return budget

    def close(self) -> None:
        """Stops the lanes. The arena stays mapped as long as this object lives."""
        self._finalizer()


def _versions() -> dict[str, str]:
    return {"routeahead": version("routeahead"), "llama_cpp_python": llama_cpp.__version__}
