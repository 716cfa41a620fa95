"""Grades settings against a baseline: perplexity, divergence, answers and long generations.

Text is evaluated one token at a time in decode, because a policy that acts in decode only would not
act on the tokens of a prefill. The baseline runs first and leaves its logits on disk: both models
may not fit in memory together. They are float32, because rounded ones would show a divergence for a
lossless setting.

An evaluation that resumes begins with an empty expert cache. Bytes and hits, and the output of a
setting that depends on what is cached, therefore depend a little on the moment of the interruption.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from routeahead.cluster import Cluster
from routeahead.engine.llama import Llama
from routeahead.engine.ubatch import DEFAULT
from routeahead.errors import RouteAheadError, SettingsError
from routeahead.evaluation import corpus, grading
from routeahead.evaluation.corpus import Chunk, Piece, Vocabulary
from routeahead.evaluation.grading import Tick
from routeahead.evaluation.spread import Job, cut, do, files_of
from routeahead.evaluation.summary import Summary, summarise
from routeahead.evaluation.work import BASELINE, WorkFolder
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.machine.memory import available_bytes

DEFAULT_CONTEXT = 512
DEFAULT_TOKENS = 2048
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")

Progress = Callable[[str, int, int], None]
"""Takes a setting's name, its tokens that are done, and all of them (an upper bound)."""


@dataclass(frozen=True)
class Setting:
    """A way to run the model: keyword arguments of `routeahead.Llama`, under a name."""

    name: str
    kwargs: dict[str, Any]

    def validate(self) -> Setting:
        """Returns self.

        Raises:
            SettingsError: the name cannot be a folder's, or is the baseline's.
        """
        if not _NAME.fullmatch(self.name) or self.name == BASELINE:
            raise SettingsError(
                f"setting {self.name!r}: give it a name of letters, digits and ._+=- "
                f"other than {BASELINE}"
            )
        return self


@dataclass(frozen=True)
class Request:
    """What to grade on.

    Attributes:
        model: GGUF file.
        text: UTF-8 text, graded token by token.
        prompts: JSON lines with prompts and their answers (`corpus.read_prompts`).
        context: of the model, and of a chunk of text; None: 512, or the model's if smaller.
        max_tokens: tokens of the text to grade at most.
        generate: tokens of each long generation, from each prompt, or from the text's beginning
            if there are no prompts; 0: none.
        prompt_through_decode: feed prompts token by token through decode as well.
        threads: compute threads.
        baseline: keyword arguments of `routeahead.Llama` for the run to compare with.
    """

    model: Path
    text: Path | None = None
    prompts: Path | None = None
    context: int | None = None
    max_tokens: int = DEFAULT_TOKENS
    generate: int = 0
    prompt_through_decode: bool = False
    threads: int = field(default_factory=default_threads)
    baseline: dict[str, Any] = field(default_factory=lambda: {"resident": True})


@dataclass(frozen=True)
class Loading:
    """How a setting's model is loaded."""

    model: Path
    context: int
    threads: int
    kwargs: dict[str, Any]

    def __call__(self) -> Llama:
        """
        Raises:
            SettingsError: it is to be resident and does not fit.
        """
        file_bytes = read_layout(self.model).file_bytes
        if self.kwargs.get("resident") and file_bytes > (free := available_bytes()):
            raise SettingsError(
                f"resident, the model takes {file_bytes // MIB} MiB and {free // MIB} are "
                "free: stream it losslessly, as with --baseline '--cache-mb auto'"
            )
        # Of the ubatch depends in which order a prompt's numbers are added: one for all.
        common = {"n_ctx": self.context, "n_threads": self.threads, "ubatch": DEFAULT}
        return Llama(self.model, **{**common, **self.kwargs})


class Evaluation:
    """One evaluation: `run` does what its work folder does not have yet.

    Attributes:
        pieces: what each setting is graded on, in order.
        logit_bytes: what the baseline's logits will take on disk in addition to those there.
    """

    def __init__(self, request: Request, settings: Sequence[Setting], work: Path) -> None:
        """Plans the evaluation and opens its work folder.

        Raises:
            SettingsError: a file, name or size cannot be used, or `work` holds another evaluation.
            ModelError: the model file cannot be used.
        """
        self._request = request
        self._settings = [setting.validate() for setting in settings]
        if len({setting.name for setting in settings}) < len(settings):
            raise SettingsError("two settings have the same name")
        if not (request.text or request.prompts):
            raise SettingsError("nothing to grade on: give --text or --prompts")
        layout = read_layout(request.model)
        trained = layout.value("context_length")
        self._context = request.context or min(DEFAULT_CONTEXT, int(trained or DEFAULT_CONTEXT))
        with corpus.open_vocabulary(layout.shards[0].path) as vocabulary:
            self._vocabulary_size = vocabulary.size
            self.pieces = _pieces(request, self._context, vocabulary)
        self._work = WorkFolder(work, self._plan([shard.path for shard in layout.shards]))
        for setting in self._settings:
            self._work.open_setting(setting.name, _with_digests(setting.kwargs))
        self.logit_bytes = self._logit_bytes()
        self._work.check_room(self.logit_bytes)

    def run(self, progress: Progress = lambda *_: None) -> list[Summary]:
        """Evaluates what is missing; returns the baseline's figures, then those of each setting.

        Finished pieces are kept whatever ends this, and are not evaluated again.

        Raises:
            SettingsError, ModelError, ReadError, StreamError: a setting failed; its name is first
                in the message.
        """
        self._evaluate(Setting(BASELINE, self._request.baseline), progress)
        for setting in self._settings:
            self._evaluate(setting, progress)
        for piece in self.pieces:
            self._work.drop_logits(piece.name)
        return self._summaries()

    def spread(self, cluster: Cluster, progress: Progress = lambda *_: None) -> list[Summary]:
        """`run` on the nodes of a cluster: the same figures, but for the times.

        Raises:
            RouteAheadError: as `run`, or a node lacks something.
        """
        files = files_of(self._request.model)

        def job(setting: Setting, pieces: Sequence[Piece]) -> Job:
            return Job(
                setting.name,
                self._loading(setting),
                self._request.model,
                files,
                pieces,
                self._request.prompt_through_decode,
                setting.name == BASELINE,
            )

        baseline = Setting(BASELINE, self._request.baseline)
        # Logits that an earlier run left lie where it ran: they are made anew.
        pending = [
            piece
            for piece in self.pieces
            if not self._work.has(BASELINE, piece.name)
            or (isinstance(piece, Chunk) and self._is_needed(piece))
        ]
        resident = baseline.kwargs.get("resident")
        parts = cut(pending, len(cluster.nodes) if resident else 1)
        logits = self._jobs(cluster, [job(baseline, part) for part in parts], [], progress)
        left = [
            (setting, [piece for piece in self.pieces if not self._is_done(setting.name, piece)])
            for setting in self._settings
        ]
        jobs = [job(setting, pieces) for setting, pieces in left if pieces]
        self._jobs(cluster, jobs, logits, progress)
        return self._summaries()

    def _jobs(
        self, cluster: Cluster, jobs: Sequence[Job], logits: list[Any], progress: Progress
    ) -> list[Any]:
        """Has jobs done, and saves their results; gives references to the logits that they kept."""
        kept = []
        total = sum(piece.work for piece in self.pieces)
        done = {one.name: total for one in jobs}
        for one in jobs:
            done[one.name] -= sum(piece.work for piece in one.pieces)
            progress(one.name, done[one.name], total)
        calls = [(one, logits) for one in jobs]
        for index, (results, reference) in cluster.map(do, calls, parts=2):
            for piece, result in cluster.get(results).items():
                self._work.save(jobs[index].name, piece, result)
            done[jobs[index].name] += sum(piece.work for piece in jobs[index].pieces)
            progress(jobs[index].name, done[jobs[index].name], total)
            kept.append(reference)
        return kept

    # --- what is to be done ---

    def _logit_bytes(self) -> int:
        tokens = sum(
            piece.work
            for piece in self.pieces
            if isinstance(piece, Chunk)
            and self._is_needed(piece)
            and not self._work.has_logits(piece.name)
        )
        return tokens * self._vocabulary_size * np.dtype(np.float32).itemsize

    def _plan(self, shards: Sequence[Path]) -> dict[str, Any]:
        """All that the figures depend on except the setting, to recognise another evaluation."""
        request = self._request
        stats = [(path.name, path.stat()) for path in shards]
        return {
            "model": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
            "text": _digest(request.text),
            "prompts": _digest(request.prompts),
            "context": self._context,
            "max_tokens": request.max_tokens,
            "generate": request.generate,
            "prompt_through_decode": request.prompt_through_decode,
            "threads": request.threads,
            "baseline": _with_digests(request.baseline),
            "routeahead version": version("routeahead"),
            "llama-cpp-python version": version("llama-cpp-python"),
        }

    def _is_needed(self, chunk: Chunk) -> bool:
        """Whether a setting has yet to be compared with the baseline's logits of this chunk."""
        return any(not self._work.has(s.name, chunk.name) for s in self._settings)

    def _is_done(self, name: str, piece: Piece) -> bool:
        if not self._work.has(name, piece.name):
            return False
        if name == BASELINE and isinstance(piece, Chunk) and self._is_needed(piece):
            return self._work.has_logits(piece.name)
        return True

    # --- doing it ---

    def _evaluate(self, setting: Setting, progress: Progress) -> None:
        pending = [piece for piece in self.pieces if not self._is_done(setting.name, piece)]
        total = sum(piece.work for piece in self.pieces)
        done = total - sum(piece.work for piece in pending)
        progress(setting.name, done, total)
        if not pending:
            return
        try:
            with contextlib.closing(self._loading(setting)()) as llm:
                for piece in pending:
                    self._do(llm, setting.name, piece, _ticker(progress, setting.name, done, total))
                    done += piece.work
                    progress(setting.name, done, total)
        except RouteAheadError as error:
            raise type(error)(f"{setting.name}: {error}") from error

    def _do(self, llm: Llama, name: str, piece: Piece, tick: Tick) -> None:
        before = copy(llm.counters.decode)
        result = self._graded(llm, name, piece, tick)
        result["decode"] = vars(llm.counters.decode.minus(before))
        self._work.save(name, piece.name, result)

    def _loading(self, setting: Setting) -> Loading:
        request = self._request
        return Loading(request.model, self._context, request.threads, setting.kwargs)

    def _graded(self, llm: Llama, name: str, piece: Piece, tick: Tick) -> dict[str, Any]:
        through_decode = self._request.prompt_through_decode
        if not isinstance(piece, Chunk):
            return grading.graded(llm, piece, through_decode, tick)
        if name == BASELINE:
            with self._work.new_logits(piece.name) as keep:
                return grading.graded(llm, piece, through_decode, tick, keep=keep)
        logits = self._work.logits(piece.name, self._vocabulary_size)
        return grading.graded(llm, piece, through_decode, tick, baseline=logits)

    def _summaries(self) -> list[Summary]:
        baseline = self._results(BASELINE)
        return [
            summarise(BASELINE, self._request.baseline, baseline, None),
            *(
                summarise(setting.name, setting.kwargs, self._results(setting.name), baseline)
                for setting in self._settings
            ),
        ]

    def _results(self, name: str) -> dict[str, dict[str, Any]]:
        return {piece.name: self._work.read(name, piece.name) for piece in self.pieces}


def _pieces(request: Request, context: int, vocabulary: Vocabulary) -> list[Piece]:
    pieces: list[Piece] = []
    openings: list[Sequence[int]] = []
    if request.text:
        bos, tokens = (
            vocabulary.bos,
            vocabulary.tokens(corpus.read_text(request.text), prompt=False),
        )
        pieces += corpus.chunks(tokens, bos, context=context, max_tokens=request.max_tokens)
        room = context - request.generate - len(bos)
        openings = [(*bos, *tokens[: max(1, min(room, corpus.OPENING_TOKENS))])]
    if request.prompts:
        prompts = corpus.read_prompts(request.prompts)
        pieces += corpus.questions(prompts, vocabulary, context)
        openings = [vocabulary.tokens(item.prompt, prompt=True) for item in prompts]
    if request.generate:
        pieces += corpus.openings(openings, request.generate, context)
    return pieces


def _ticker(progress: Progress, name: str, done: int, total: int) -> Tick:
    return lambda tokens: progress(name, done + tokens, total)


def _with_digests(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments as JSON has them, in which a file stands for its content."""

    def as_json(value: Any) -> Any:
        if isinstance(value, Path):
            return _digest(value)
        return list(value) if isinstance(value, tuple) else value

    return {key: as_json(value) for key, value in kwargs.items()}


def _digest(path: Path | None) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path else None
    except OSError as error:
        raise SettingsError(f"{path}: cannot read it: {error.strerror}") from None
