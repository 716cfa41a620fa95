"""One generation of `run`: its text piece by piece, and what is known of it afterwards."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_grammar import LlamaGrammar, json_schema_to_gbnf

from routeahead.cli import report as reports
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.llamacpp import native_log
from routeahead.telemetry.counters import Totals

# What a report has of each decoded token, so that a benchmark can leave out the first ones.
STEP_COLUMNS = (
    "wall_s", "compute_s", "stall_s", "adopt_s", "mgmt_s", "io_s", "cpu_s", "bytes_read", "reads",
    "hits", "misses", "kept",
)  # fmt: skip


class Generation:
    """One generation: iterate over its text; the rest is known afterwards.

    Attributes:
        prompt_tokens, tokens: ids.
        text: what was generated so far.
        decode_steps: what was counted for each decoded batch.
        interrupted: whether it was stopped from outside.
        seed: as it was given.
        first_token_s, total_s: from the start of the prompt's evaluation.
    """

    def __init__(
        self,
        llm: Llama,
        prompt: Sequence[int],
        n: int,
        *,
        forced: list[int] | None = None,
        stop: Sequence[str] = (),
        sampling: dict[str, Any],
        seed: int = 0,
    ) -> None:
        """With `forced` tokens, each is evaluated as if it had been sampled.

        Args:
            n: tokens at most.
            stop: texts before which the generation ends.
            sampling: arguments of `Llama.generate`.
            seed: for the report; the model has it already.

        Raises:
            SettingsError: there is no prompt, or no room for it.
        """
        self._llm, self._forced, self._stop, self._sampling = llm, forced, stop, sampling
        self.prompt_tokens = list(prompt)
        if not self.prompt_tokens and forced:
            self.prompt_tokens = forced[:1]
        if not self.prompt_tokens:
            raise SettingsError("the prompt has no tokens: give another")
        room = llm.room - len(self.prompt_tokens)
        self._limit, self.seed = min(n, room), seed
        self._wanted = n
        if forced and self._limit < 1:
            raise SettingsError(f"the prompt leaves no room in a context of {llm.room}: raise -c")
        self.tokens: list[int] = []
        self.text = ""
        self.interrupted = False
        self.first_token_s = self.total_s = 0.0
        self.decode_steps: list[Totals] = []

    @property
    def cut_short(self) -> bool:
        """Whether the context was full before `n` tokens were there."""
        return self._limit < self._wanted and len(self.tokens) >= self._limit

    def __iter__(self) -> Iterator[str]:
        """The text, token by token; what may be the beginning of a stop text is held back."""
        held, started = "", time.perf_counter()
        try:
            for piece in self._pieces(started):
                held += piece
                ends = [at for stop in self._stop if (at := held.find(stop)) >= 0]
                if ends:
                    held = held[: min(ends)]
                    break
                sure = len(held) - _begun(held, self._stop)
                yield self._said(held[:sure])
                held = held[sure:]
            yield self._said(held)
        finally:
            self.total_s = time.perf_counter() - started

    def _said(self, text: str) -> str:
        self.text += text
        return text

    def _pieces(self, started: float) -> Iterator[str]:
        llm, decoder = self._llm, codecs.getincrementaldecoder("utf-8")("replace")
        vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
        counted = replace(llm.counters.decode)
        for token in self._steps():
            step = llm.counters.decode.minus(counted)
            if step.tokens:
                self.decode_steps.append(step)
            elif step.accepted:
                self.decode_steps[-1].add(step)
            counted = replace(llm.counters.decode)
            self.first_token_s = self.first_token_s or time.perf_counter() - started
            ended = self._forced is None and llama_cpp.llama_vocab_is_eog(vocabulary, token)
            if ended or len(self.tokens) >= self._limit:
                break
            self.tokens.append(token)
            yield decoder.decode(llm.detokenize([token], prev_tokens=self.prompt_tokens))
            if len(self.tokens) >= self._limit:
                break

    def _steps(self) -> Iterator[int]:
        llm = self._llm
        if self._forced is None:
            yield from llm.generate(self.prompt_tokens, **self._sampling)
            return
        start = time.perf_counter()
        llm.eval(self.prompt_tokens)
        self.first_token_s = time.perf_counter() - start
        llm.phase = "decode"
        for token in self._forced:
            llm.eval([token])
            yield token

    def figures(self) -> dict[str, float | int]:
        return reports.counters(self._llm, self.first_token_s, self.total_s)

    def lines(self) -> list[str]:
        """The run for a terminal."""
        return reports.lines(self._llm, self.figures(), len(self.prompt_tokens), len(self.tokens))

    def as_dict(self) -> dict[str, Any]:
        llm = self._llm
        settings = {"n_ctx": llm.n_ctx(), "threads": llm.n_threads, "stop": list(self._stop)}
        sampling = {name: value for name, value in self._sampling.items() if name != "grammar"}
        return {
            "settings": llm.settings.as_dict() | settings | sampling | {"seed": self.seed},
            "model": reports.model(llm),
            "prompt_tokens": len(self.prompt_tokens),
            "tokens": self.tokens,
            "text": self.text,
            "interrupted": self.interrupted,
            "counters": self.figures(),
            "decode_steps": {
                name: [getattr(step, name) for step in self.decode_steps] for name in STEP_COLUMNS
            },
            **reports.device(llm),
            **reports.policies(llm),
        }


def _begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop text."""
    longest = max(map(len, stops), default=0)
    return next(
        (n for n in range(min(longest, len(text)), 0, -1)
         if any(stop.startswith(text[-n:]) for stop in stops)),
        0,
    )  # fmt: skip


def read_grammar(llm: Llama, grammar: Path | None, schema: Path | None) -> Any:
    """The grammar that the output has to follow, of a GBNF file or a JSON schema; None if neither.

    Raises:
        SettingsError: a file cannot be read, or is neither.
    """
    path = grammar or schema
    if path is None:
        return None
    if grammar and schema:
        raise SettingsError("give --grammar or --json-schema, not both")
    try:
        text = path.read_text(encoding="utf-8-sig")
        rules: str = text if grammar else json_schema_to_gbnf(json.dumps(json.loads(text)))
    except Exception as error:  # of the disk, of JSON, of the schema's translation
        raise SettingsError(f"{path}: cannot be used: {error}") from None
    with native_log.errors() as logged, native_log.printed() as printed:
        vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, rules.encode(), b"root")
    if not sampler:  # llama-cpp-python would use it all the same, and crash
        reasons = [line for line in (*printed, *logged) if line]
        why = f": {reasons[0]}" if reasons else ""
        raise SettingsError(f"{path}: llama.cpp does not understand this grammar{why}")
    llama_cpp.llama_sampler_free(sampler)
    return LlamaGrammar.from_string(rules, verbose=False)
