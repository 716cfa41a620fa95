"""`routeahead run`: answers a prompt."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.cli import options, terminal
from routeahead.cli.generation import Generation, read_grammar
from routeahead.cli.open_model import open_model
from routeahead.cli.options import SAMPLING
from routeahead.cli.prompt import STDIN, read_prompt, tokens
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.experts.layout import shard_paths
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.output_files import check_apart, check_writable
from routeahead.telemetry.recorder import Outputs

# llama.cpp takes the seed 2**32 - 1 for "none".
SEEDS = (1 << 32) - 1


def _sampling_option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING, **more)


@options.with_settings
def run(
    model: options.Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Question to the model.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with the question, without its last line break; - is stdin."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message: how the model is to answer.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt, without the model's chat template.")
    ] = False,
    n: Annotated[int, typer.Option("-n", min=0, help="Tokens to generate at most.")] = 256,
    threads: options.Threads = None,
    context: options.Context = None,
    report: Annotated[Path | None, typer.Option(help="Write the run as JSON to this file.")] = None,
    temp: Annotated[float, _sampling_option("Temperature; 0 decodes greedily.", min=0)] = 0.0,
    seed: Annotated[
        int | None,
        _sampling_option(
            "With --temp: the same seed repeats a run.",
            min=0,
            max=SEEDS - 1,
            show_default="another each time",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        _sampling_option("With --temp: of the likeliest K tokens.", min=1, show_default="40"),
    ] = None,
    top_p: Annotated[
        float | None,
        _sampling_option(
            "With --temp: of the likeliest tokens that make up this share.",
            min=0,
            max=1,
            show_default="0.95",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        _sampling_option(
            "With --temp: of tokens at least this likely, as a share of the likeliest.",
            min=0,
            max=1,
            show_default="0.05",
        ),
    ] = None,
    repeat_penalty: Annotated[
        float, _sampling_option("Above 1: makes repetition less likely.", min=0.01)
    ] = 1.0,
    stop: Annotated[
        list[str] | None, _sampling_option("End before this text; may be given several times.")
    ] = None,
    grammar: Annotated[
        Path | None, _sampling_option("Output follows this grammar, a GBNF file.", metavar="FILE")
    ] = None,
    json_schema: Annotated[
        Path | None, _sampling_option("Output is JSON of this schema.", metavar="FILE")
    ] = None,
    forced_tokens: options.ForcedTokens = "",
    csv: options.Csv = None,
    io_trace: options.IoTrace = None,
    route_trace: options.RouteTrace = None,
    route_scores: options.RouteScores = False,
    **settings: Any,
) -> None:
    """Answer a prompt; the text goes to stdout, a summary of the run to stderr.

    Without -p and --prompt-file, what is piped in is the prompt. All text is UTF-8.

    \b
    routeahead run model.gguf -p "Why is the sky blue?"
    routeahead run model.gguf -p "The sky is blue because" --raw -n 64
    routeahead run model.gguf --prompt-file question.txt --report run.json
    git diff | routeahead run model.gguf --cache-mb 4G --system "Summarise this."
    """
    path = options.model_path(model)
    inputs = {
        "the prompt": None if prompt_file == STDIN else prompt_file,
        "the forced tokens": options.tokens_file(forced_tokens),
        "the recorded routing": settings["replay_routing"],
        "the grammar": grammar,
        "the schema": json_schema,
    }
    if route_scores and not route_trace:
        raise SettingsError("route_scores has no effect without route_trace")
    outputs = Outputs(
        csv=csv, io_trace=io_trace, route_trace=route_trace, route_scores=route_scores
    )
    _check_files(path, inputs, outputs, report)
    sampling = {
        "temp": temp,
        "repeat_penalty": repeat_penalty,
        **_of_temperature(temp, top_k=top_k, top_p=top_p, min_p=min_p),
    }
    if forced_tokens and settings["lookup"]:
        raise SettingsError("--lookup guesses what is sampled: not with --forced-tokens")
    # What is piped into a run that is fed with tokens is not for it.
    fed = bool(forced_tokens) and prompt is None and prompt_file is None
    text = "" if fed else read_prompt(prompt, prompt_file)
    if not text and not forced_tokens:
        raise SettingsError("the prompt is empty: give one with -p or --prompt-file, or pipe it in")
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    with terminal.progress() as say:
        llm = open_model(path, settings, say, context=context, threads=threads, outputs=outputs)
    try:
        llm.set_seed(seed)
        forced = options.forced_tokens(forced_tokens, n, llm.n_vocab()) if forced_tokens else None
        sampling["grammar"] = read_grammar(llm, grammar, json_schema)
        generation = Generation(
            llm,
            tokens(llm, text, system=system, raw=raw),
            n,
            forced=forced,
            stop=[one for one in stop or () if one],
            sampling=sampling,
            seed=seed,
        )
        _print(generation, llm, report, lambda: options.announce(model))
        if generation.cut_short and not generation.interrupted:
            terminal.note(f"the context of {llm.room} tokens is full before -n {n}: raise -c")
        seeded = [f"moe-sampling: temperature {temp:g}, seed {seed}"] if temp else []
        terminal.print_lines([*generation.lines(), *seeded], stderr=True)
        if generation.interrupted:
            raise typer.Exit(130)
    finally:
        llm.close()


def _check_files(
    model: Path, inputs: dict[str, Path | None], outputs: Outputs, report: Path | None
) -> None:
    """Checks, before anything is opened, that no output is an input; and that there can be a
    report after the run."""
    read = [("a file of the model", shard) for shard in shard_paths(model)]
    read += [(what, path) for what, path in inputs.items() if path]
    check_apart(read, [*([report] if report else []), *outputs.paths])
    if report:
        check_writable(report)


def _of_temperature(temp: float, **given: float | None) -> dict[str, float]:
    """The options that choose among likely tokens, which only a temperature does."""
    found = {name: value for name, value in given.items() if value is not None}
    if found and not temp:
        flag = next(iter(found)).replace("_", "-")
        raise SettingsError(f"--{flag} has no effect at temperature 0: give --temp")
    return found


def _print(
    generation: Generation, llm: Llama, report: Path | None, at_first: Callable[[], None]
) -> None:
    """Prints the text as it comes, and writes the report, also of what an interrupt left."""
    try:
        for index, piece in enumerate(_pieces(generation, llm)):
            if not index:
                at_first()
            print(_shown(piece), end="", flush=True)
        print()
    except KeyboardInterrupt:
        print()
        generation.interrupted = True
    finally:
        if report:
            write_json(report, generation.as_dict())


def _pieces(generation: Generation, llm: Llama) -> Iterator[str]:
    """The pieces of the text; until the first, says how much of the prompt was read."""
    pieces, total = iter(generation), len(generation.prompt_tokens)
    prefill = llm.counters.prefill

    def reading() -> str:
        done, wall = prefill.tokens, prefill.wall_s
        rate = f", {done / wall:.1f} tok/s" if done else ""
        return f"reading the prompt: {done} of {total} tokens{rate}"

    with terminal.progress() as say:
        say(reading)
        first = next(pieces, "")
    yield first
    yield from pieces


def _shown(piece: str) -> str:
    """A terminal shows control characters that a model wrote; a file gets them as they are."""
    return terminal.without_controls(piece) if sys.stdout.isatty() else piece
