"""How a `llama_cpp.Llama` is loaded without its experts, and with what arguments."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import llama_cpp
from jinja2 import TemplateError
from llama_cpp.llama_speculative import LlamaDraftModel

from routeahead.config import OF_RESIDENT_TOO, Settings
from routeahead.engine.offload import EXPERTS, Offload, plan
from routeahead.engine.speculation import Verifying, draft_model
from routeahead.engine.streamed_model import Hooks, StreamedModel
from routeahead.engine.ubatch import DEFAULT, batch_arguments
from routeahead.errors import ModelError, RouteAheadError, SettingsError, StreamError, UseError
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.experts.packed import ARCHITECTURE
from routeahead.llamacpp import native_abort, native_log
from routeahead.llamacpp.devices import devices
from routeahead.llamacpp.placement import ExpertsInRam
from routeahead.llamacpp.text import FileName, detokenize
from routeahead.machine.cpus import default_threads
from routeahead.machine.memory import available_bytes
from routeahead.routing.policy import Policy
from routeahead.telemetry.recorder import NOTHING, Outputs


class Loading(Verifying):
    """The part of `engine.llama.Llama` that loads it; its attributes are described there."""

    settings: Settings
    layout: ModelLayout
    offload: Offload
    buffers: native_log.Buffers
    streamed: StreamedModel | None = None
    _cannot_travel: bool  # it was given what cannot be pickled

    # --- what llama_cpp.Llama's constructor does not expose ---

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        """The constructor's `self.model_params = llama_model_default_params()` arrives here."""
        params.use_extra_bufts = False  # a repacked weight no longer has the file's layout
        if self.streamed:
            self.streamed.inject_model(params)
        elif self.offload.layers:
            self._in_ram = ExpertsInRam(EXPERTS)
            self._in_ram.inject(params)
        self._model_params = params

    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        if self.streamed:
            self.streamed.inject_context(params)
        self._context_params = params

    # --- before the load ---

    def _plan_offload(self, llama: dict[str, Any]) -> Offload:
        """Decides what goes to a device, and tells llama.cpp.

        Raises:
            SettingsError: it does not fit, or llama.cpp would copy experts there.
        """
        wanted, there = self.settings.n_gpu_layers, llama_cpp.llama_supports_gpu_offload()
        if llama.get("op_offload") and there and not self.settings.resident:
            # The scheduler copies experts when a part of the graph begins: before they are read.
            raise SettingsError(
                "op_offload copies experts to the device before they have been read: leave it out"
            )
        if not llama.get("op_offload"):
            llama["op_offload"] = False
        found = devices() if wanted == "auto" else []
        free = sum(device.free for device in found)
        offload = plan(
            self.layout.loaded(),
            wanted,
            free=free,
            context=llama.get("n_ctx", 512),
            rows=llama.get("n_ubatch", 512),
        )
        llama["n_gpu_layers"] = offload.layers
        return offload

    def _prepare(self, outputs: Outputs, policies: Sequence[Policy], hooks: Hooks) -> None:
        """Makes the streaming parts. What cannot be streamed is loaded whole, if it fits."""
        try:
            if not self.layout.experts:
                raise StreamError(f"it has no experts ({self.layout.arch})")
            self.streamed = StreamedModel(
                self.layout,
                self.settings,
                self.offload,
                outputs=outputs,
                policies=policies,
                hooks=hooks,
            )
        except StreamError as error:
            need, free = self.layout.file_bytes, available_bytes()
            path = self.layout.shards[0].path
            if outputs != NOTHING or policies:
                raise StreamError(
                    f"{path}: cannot stream ({error}): traces and policies are about streaming"
                ) from error
            if self.layout.packed:
                raise StreamError(
                    f"{path}: cannot stream ({error}), and a packed file cannot be loaded whole: "
                    "use the file that it was made from"
                ) from error
            if need > free:
                raise StreamError(
                    f"{path}: cannot stream ({error}), and {need // MIB} MiB do not fit in the "
                    f"{free // MIB} MiB that are free"
                ) from error
            warnings.warn(
                f"{path}: cannot stream, so the whole model is loaded: {error}", stacklevel=3
            )
            kept = {name: getattr(self.settings, name) for name in OF_RESIDENT_TOO}
            self.settings = Settings(resident=True, **kept)

    # --- the load ---

    def _load(self, llama: dict[str, Any]) -> LlamaDraftModel | None:
        """Has llama.cpp load what is its own; returns what makes drafts, if anything does.

        Raises:
            ModelError: llama.cpp cannot load the file.
            SettingsError: settings contradict each other or the model.
        """
        llama.setdefault("verbose", False)
        llama["n_threads"] = llama.get("n_threads") or default_threads()
        llama["n_threads_batch"] = llama.get("n_threads_batch") or llama["n_threads"]
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
        if self.layout.packed:
            overrides = llama.get("kv_overrides") or {}
            llama["kv_overrides"] = {**overrides, ARCHITECTURE: self.layout.arch}
        llama.update(batch_arguments(llama, self.settings, self.layout))
        path = FileName(self.layout.shards[0].path)
        drafts = draft_model(llama.pop("draft_model", None), self.settings.lookup)
        try:
            with native_log.errors(self.buffers) as reasons:
                native_abort.guarded(lambda: super(Loading, self).__init__(path, **llama))
        except BaseException as error:
            if self.streamed:
                self.streamed.abandon()
            llamas = (ValueError, RuntimeError, AssertionError, TemplateError)
            if isinstance(error, RouteAheadError) or not isinstance(error, llamas):
                raise
            wanted = self.settings.n_expert_used or 0
            if isinstance(error, native_abort.NativeAbort) and wanted > self.layout.n_expert_used:
                raise SettingsError(
                    f"n_expert_used={wanted}: llama.cpp's graph has no room for so many in this "
                    f"model ({error}): give fewer"
                ) from error
            reason = reasons[0] if reasons else error
            raise ModelError(f"{path}: llama.cpp cannot load it: {reason}") from error
        self.metadata[ARCHITECTURE] = self.layout.arch  # a packed file names another one
        native_abort.remember(self, os.fspath(self.layout.shards[0].path))
        if not self._logits_all:  # the rows are nobody's, and `save_state` would copy them
            self.scores = self.scores[:DEFAULT]
        pieces = functools.partial(detokenize, self._model.vocab, self._model.token_bos())
        self._model.detokenize = pieces  # type: ignore[method-assign]
        return drafts

    # --- another load of the same ---

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
        drafts = state["draft_model"]
        state["draft_model"] = None if drafts is None or self.settings.lookup else drafts.model
        plain = vars(Settings())
        return state | {k: v for k, v in vars(self.settings).items() if v != plain[k]}
