"""`routeahead run`: generates text."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import llama_cpp
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from routeahead.cli import options
from routeahead.cli import report as reports
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.experts.layout import shard_paths
from routeahead.models import DEFAULT_MODEL
from routeahead.telemetry.counters import Totals
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.recorder import NOTHING, Outputs

DEFAULT_CONTEXT = 4096
# What a report has of each decoded token, so that a benchmark can leave out the first ones.
STEP_COLUMNS = (
    "wall_s", "compute_s", "stall_s", "adopt_s", "mgmt_s", "io_s", "cpu_s", "bytes_read", "hits",
    "misses",
)  # fmt: skip


@options.with_settings
def run(
    model: options.Model = DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue.")] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=0, help="Tokens to generate at most.")] = 256,
    threads: Annotated[
        int | None,
        typer.Option("-t", min=1, max=512, help="Compute threads.", show_default="free cores"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "-c",
            min=8,
            max=1 << 30,
            help="Context in tokens.",
            show_default="4096, or the model's if smaller",
        ),
    ] = None,
    temp: Annotated[float, typer.Option(min=0, help="Temperature; 0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for --temp above 0.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the run as JSON to this file.")] = None,
    forced_tokens: options.ForcedTokens = "",
    csv: options.Csv = None,
    io_trace: options.IoTrace = None,
    route_trace: options.RouteTrace = None,
    **settings: Any,
) -> None:
    """Generate text; the text goes to stdout, a summary of the run to stderr."""
    text = _prompt(prompt, prompt_file)
    _check_apart(model, [path for path in (report, csv, io_trace, route_trace) if path])
    if report:
        _check_writable(report)
    outputs = Outputs(csv=csv, io_trace=io_trace, route_trace=route_trace)
    llm = load(model, settings, context=context, threads=threads, seed=seed, outputs=outputs)
    try:
        forced = options.forced_tokens(forced_tokens, n, llm.n_vocab()) if forced_tokens else None
        generation = Generation(llm, text, n, temp, forced)
        try:
            for piece in generation:
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print()
            generation.interrupted = True
        finally:
            if report:
                write_json(report, generation.as_dict())
        for line in reports.lines(llm, generation.figures()):
            print(line, file=sys.stderr)
        if generation.interrupted:
            raise typer.Exit(130)
    finally:
        llm.close()


def load(
    model: Path,
    settings: dict[str, Any],
    *,
    context: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    outputs: Outputs = NOTHING,
) -> Llama:
    """Loads a model with a progress bar over its dense weights."""
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("dense", total=None)
        return Llama(
            model,
            n_ctx=context or DEFAULT_CONTEXT,
            cap_context=context is None,
            n_threads=threads,
            seed=seed,
            outputs=outputs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **settings,
        )


class Generation:
    """One generation: iterate over its text; the rest is known afterwards.

    Attributes:
        prompt_tokens, tokens: ids.
        text: what was generated so far.
        decode_steps: what was counted for each decoded token.
        interrupted: whether it was stopped from outside.
    """

    def __init__(
        self, llm: Llama, prompt: str, n: int, temp: float, forced: list[int] | None
    ) -> None:
        """With `forced` tokens, each is evaluated as if it had been sampled."""
        self._llm, self._temp, self._forced = llm, temp, forced
        self.prompt_tokens = llm.tokenize(os.fsencode(prompt), add_bos=True, special=True)
        if not self.prompt_tokens and forced:
            self.prompt_tokens = forced[:1]
        if not self.prompt_tokens:
            raise SettingsError("the prompt is empty: give one with -p or --prompt-file")
        self._limit = min(n, llm.room - len(self.prompt_tokens))
        if forced and self._limit < 1:
            raise SettingsError(f"the prompt leaves no room in a context of {llm.room}: raise -c")
        self.tokens: list[int] = []
        self.text = ""
        self.interrupted = False
        self.first_token_s = 0.0
        self.decode_steps: list[Totals] = []

    def __iter__(self) -> Iterator[str]:
        llm, decoder = self._llm, codecs.getincrementaldecoder("utf-8")("replace")
        start = time.perf_counter()
        vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
        counted = replace(llm.counters.decode)
        for token in self._steps():
            step = llm.counters.decode.minus(counted)
            if step.tokens:
                self.decode_steps.append(step)
                counted = replace(llm.counters.decode)
            self.first_token_s = self.first_token_s or time.perf_counter() - start
            ended = self._forced is None and llama_cpp.llama_vocab_is_eog(vocabulary, token)
            if ended or len(self.tokens) >= self._limit:
                break
            self.tokens.append(token)
            piece = decoder.decode(llm.detokenize([token], prev_tokens=self.prompt_tokens))
            self.text += piece
            yield piece
            if len(self.tokens) >= self._limit:
                break

    def _steps(self) -> Iterator[int]:
        llm = self._llm
        if self._forced is None:
            yield from llm.generate(self.prompt_tokens, temp=self._temp)
            return
        start = time.perf_counter()
        llm.eval(self.prompt_tokens)
        self.first_token_s = time.perf_counter() - start
        llm.phase = "decode"
        for token in self._forced:
            llm.eval([token])
            yield token

    def figures(self) -> dict[str, float | int]:
        return reports.counters(self._llm, self.first_token_s)

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": self._llm.settings.as_dict()
            | {"n_ctx": self._llm.n_ctx(), "threads": self._llm.n_threads, "temp": self._temp},
            "model": reports.model(self._llm),
            "prompt_tokens": len(self.prompt_tokens),
            "tokens": self.tokens,
            "text": self.text,
            "interrupted": self.interrupted,
            "counters": self.figures(),
            "decode_steps": {
                name: [getattr(step, name) for step in self.decode_steps] for name in STEP_COLUMNS
            },
            **reports.policies(self._llm),
        }


def _prompt(prompt: str, prompt_file: Path | None) -> str:
    if prompt and prompt_file:
        raise SettingsError("give -p or --prompt-file, not both")
    if prompt_file is None:
        return prompt
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{prompt_file}: cannot read the prompt: {error}") from None


def _check_apart(model: Path, outputs: list[Path]) -> None:
    """What a run writes must be neither the model nor what else it writes."""
    taken = {shard.resolve(): "a file of the model" for shard in shard_paths(model)}
    for path in outputs:
        place = path.resolve()
        if place in taken:
            raise SettingsError(f"{path}: is {taken[place]}: write to another file")
        if not place.is_char_device():
            taken[place] = "written already"


def _check_writable(path: Path) -> None:
    """A report that cannot be written is refused before the run, not after it."""
    there = path.exists()
    try:
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise SettingsError(f"{path}: cannot write the report: {error.strerror}") from None
