"""Fits the routers of a model in one pass over a text, and judges them on held-out documents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from routeahead.calibration.documents import Stretch, read_documents, stretches
from routeahead.calibration.moments import Doubles, Moments, Pair, pairs_of, ridge
from routeahead.calibration.observer import Observer
from routeahead.calibration.scoring import Scoring
from routeahead.engine.fingerprint import fingerprint
from routeahead.engine.llama import Llama
from routeahead.errors import ModelError, SettingsError
from routeahead.evaluation.corpus import open_vocabulary
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.machine.memory import available_bytes
from routeahead.prediction.gates import Gates
from routeahead.routing.policy import HALF
from routeahead.telemetry.tensor_file import read_tensors, write_tensors
from routeahead.types import Floats, Ids

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
DEFAULT_CONTEXT = 512
DEFAULT_TOKENS = 100_000
_CHECKPOINT_S = 300.0

Progress = Callable[[str, int, int], None]
"""Takes what is being done, tokens or layers that are done, and all of them."""


@dataclass(frozen=True)
class Request:
    """What to calibrate, and on what.

    Attributes:
        model: GGUF file.
        texts: see `documents.read_documents`.
        depths: in MoE layers, each at least 1, or HALF: from what the layer's attention is given.
        layers: numbers of the layers to predict; None: all MoE layers.
        context: tokens of a stretch of a document.
        max_tokens: of the documents, held-out ones included.
        threads: compute threads.
        settings: keyword arguments of `routeahead.Llama`.
    """

    model: Path
    texts: Sequence[Path]
    depths: Sequence[float] = (2,)
    layers: Sequence[int] | None = None
    context: int = DEFAULT_CONTEXT
    max_tokens: int = DEFAULT_TOKENS
    threads: int = field(default_factory=default_threads)
    settings: dict[str, Any] = field(default_factory=dict)


class Calibration:
    """One calibration: continues from its checkpoint if there is one.

    Attributes:
        nbytes: memory that it takes beside the model.
        pairs: what is predicted from where.
        width: numbers of the vector that a router is given.
    """

    def __init__(self, request: Request, checkpoint: Path) -> None:
        """Plans it.

        Raises:
            SettingsError: a text or a depth cannot be used, or memory does not suffice.
            ModelError: the model cannot be used.
        """
        self._request, self._checkpoint = request, checkpoint
        self._layout = layout = read_layout(request.model).loaded()
        if not layout.experts:
            raise ModelError(f"{request.model}: has no experts, so no routers either")
        self.pairs = _pairs(request, layout.moe_layers)
        self.width = int(layout.value("embedding_length") or 0)
        self.nbytes = self._memory()
        self._check_memory(layout)
        trained = int(layout.value("context_length") or request.context)
        self._context = min(request.context, trained)
        with open_vocabulary(layout.shards[0].path) as vocabulary:
            self._stretches = stretches(
                read_documents(request.texts),
                vocabulary,
                context=self._context,
                max_tokens=request.max_tokens,
            )
        self.model = fingerprint(layout)

    def run(self, progress: Progress = lambda *_: None) -> Gates:
        """Fits, then judges. The checkpoint stays, until the caller has what this returns on the
        disk (`forget`).

        Raises:
            SettingsError, ModelError, ReadError, StreamError: the model could not be run.
        """
        moments = Moments(self.pairs, self.width, self._layout.n_expert)
        done = self._restore(moments)
        observer = Observer(attention=HALF in self._request.depths)
        with self._opened(observer) as llm:
            llm.eval([0])  # shows the routers
            fitting = Fitting(observer, moments, self.pairs)
            self._fit(llm, fitting, done, progress)
            scoring = self._solve(observer, moments, progress)
            del moments, fitting
            held = [one for one in self._stretches if one.held]
            observer.seen = scoring.seen
            self._feed(llm, held, "judging", progress)
        fitted = sum(len(one.tokens) for one in self._stretches if not one.held)
        tokens = sum(len(one.tokens) for one in held)
        return Gates.of(self.model, scoring.best(), fitted=fitted, held=tokens)

    def forget(self) -> None:
        """Deletes the checkpoint."""
        self._checkpoint.unlink(missing_ok=True)

    # --- before it runs ---

    def _memory(self) -> int:
        """Moments, the matrices of all penalties, and what one solution takes."""
        width, experts = self.width, self._layout.n_expert
        candidates = 4 * width * experts * len(self.pairs) * len(PENALTIES)
        solving = 8 * width * (3 * width + 4 * experts)
        return Moments.nbytes(self.pairs, width, experts) + candidates + solving

    def _check_memory(self, layout: ModelLayout) -> None:
        free = available_bytes() - layout.dense_bytes - layout.layer_bytes()
        if self.nbytes <= free:
            return
        targets = len({pair.target for pair in self.pairs})
        fit = max(1, int(targets * free / self.nbytes)) if free > 0 else 1
        raise SettingsError(
            f"calibrating {targets} layers takes {self.nbytes // MIB} MiB beside the model and "
            f"{max(0, free) // MIB} are free: give fewer, such as {fit} at a time, with --layers "
            "and the same --out"
        )

    def _plan(self) -> str:
        """Digest of all that the moments depend on."""
        tokens = hashlib.sha256()
        for one in self._stretches:
            tokens.update(np.array([one.held, *one.tokens], np.int64).tobytes())
        pairs = [vars(pair) for pair in self.pairs]
        plan = [self.model, tokens.hexdigest(), pairs, self._request.settings.get("n_expert_used")]
        return hashlib.sha256(json.dumps(plan).encode()).hexdigest()

    @contextlib.contextmanager
    def _opened(self, observer: Observer) -> Iterator[Llama]:
        llm = Llama(
            self._request.model,
            n_ctx=self._context,
            n_threads=self._request.threads,
            logits_all=True,  # else the last layer routes a prompt's last row alone
            policies=[observer],
            **self._request.settings,
        )
        with contextlib.closing(llm):
            yield llm

    # --- running ---

    def _fit(self, llm: Llama, fitting: Fitting, done: int, progress: Progress) -> None:
        fitting.observer.seen = fitting.seen
        fitted = [one for one in self._stretches if not one.held]
        saved = time.monotonic()

        def keep(count: int) -> None:
            nonlocal saved
            if time.monotonic() - saved > _CHECKPOINT_S or count == len(fitted):
                self._save(fitting.moments, count)
                saved = time.monotonic()

        self._feed(llm, fitted, "fitting", progress, done, keep)

    def _feed(
        self,
        llm: Llama,
        fed: Sequence[Stretch],
        what: str,
        progress: Progress,
        done: int = 0,
        after: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Evaluates each stretch from an empty context, but for the first `done`."""
        total = sum(len(one.tokens) for one in fed)
        tokens = sum(len(one.tokens) for one in fed[:done])
        progress(what, tokens, total)
        for count, one in enumerate(fed[done:], start=done + 1):
            llm.reset()
            llm.eval(one.tokens)
            tokens += len(one.tokens)
            progress(what, tokens, total)
            after(count)

    def _solve(self, observer: Observer, moments: Moments, progress: Progress) -> Scoring:
        scoring = Scoring(observer.ranker, PENALTIES)
        for count, pair in enumerate(self.pairs):
            progress("solving", count, len(self.pairs))
            router = observer.ranker.matrix(pair.target)
            gram, cross = moments.gram[pair.source], moments.cross[pair]
            scoring.add(pair, [router, *ridge(gram, cross, router, PENALTIES)])
        progress("solving", len(self.pairs), len(self.pairs))
        return scoring

    # --- the checkpoint ---

    def _save(self, moments: Moments, done: int) -> None:
        facts = {"plan": self._plan(), "done": done, "tokens": moments.tokens}
        write_tensors(self._checkpoint, dict(moments.named()), facts)

    def _restore(self, moments: Moments) -> int:
        """Stretches that the checkpoint has done.

        Raises:
            SettingsError: it is of another calibration.
        """
        if not self._checkpoint.exists():
            return 0
        tensors, facts = read_tensors(self._checkpoint)
        if facts.get("plan") != self._plan():
            raise SettingsError(
                f"{self._checkpoint}: of a calibration of another model or text, or of other "
                "depths or layers: remove it, or write to another file"
            )
        moments.restore(tensors, facts["tokens"])
        return int(facts["done"])


class Fitting:
    """Adds what the observer sees to the moments."""

    def __init__(self, observer: Observer, moments: Moments, pairs: Sequence[Pair]) -> None:
        self.observer, self.moments = observer, moments
        self._into: dict[float, list[Pair]] = {}
        for pair in pairs:
            self._into.setdefault(pair.target, []).append(pair)
        self._hidden: dict[float, Doubles] = {}
        self._routers: dict[int, Doubles] = {}

    def seen(self, layer: float, hidden: Floats, ids: Ids) -> None:
        rows = hidden.astype(np.float64)
        if not self._hidden or layer <= min(self._hidden):
            self._hidden.clear()
            self.moments.tokens += len(rows)
        self._hidden[layer] = rows
        self.moments.add_source(layer, rows)
        if layer in self._into:
            logits = rows @ self._router(int(layer))
            for pair in self._into[layer]:
                self.moments.add_pair(pair, self._hidden[pair.source], logits)

    def _router(self, layer: int) -> Doubles:
        """The layer's matrix (width, n_expert)."""
        if layer not in self._routers:
            self._routers[layer] = self.observer.ranker.matrix(layer).T.astype(np.float64)
        return self._routers[layer]


def _pairs(request: Request, layers: Sequence[int]) -> list[Pair]:
    whole = [depth for depth in request.depths if depth != HALF]
    if not request.depths or any(d < 1 or not float(d).is_integer() for d in whole):
        raise SettingsError(f"give each --depth as a whole number of layers, or as {HALF}")
    targets = layers if request.layers is None else request.layers
    strange = sorted(set(targets) - set(layers))
    if strange:
        raise SettingsError(
            f"layer {strange[0]} has no router: the MoE layers are {layers[0]} to {layers[-1]}"
        )
    pairs = pairs_of(layers, sorted(set(request.depths)), targets)
    if not pairs:
        raise SettingsError(
            f"nothing to predict: the model has {len(layers)} MoE layers, and none of those asked "
            f"for has one {min(request.depths)} layers before it"
        )
    return pairs
