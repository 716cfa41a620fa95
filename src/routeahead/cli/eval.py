"""`routeahead eval`: what settings cost in quality, beside a baseline."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.bench.cells import expand_shares, read_list
from routeahead.cli import options
from routeahead.cli.flags import llama_kwargs
from routeahead.cli.terminal import Column, bars, console, print_table
from routeahead.cluster import Cluster
from routeahead.errors import SettingsError
from routeahead.evaluation.evaluate import DEFAULT_TOKENS, Evaluation, Request, Setting
from routeahead.evaluation.plot import check_plot, plot
from routeahead.evaluation.summary import Summary
from routeahead.experts.layout import MIB, ModelLayout, shard_paths
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.output_files import check_apart, check_writable


def evaluate(
    model: options.Model = None,
    text: Annotated[Path | None, typer.Option(help="Text to grade on, UTF-8.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Prompts: lines of {"prompt": ..., "answer": ..., "kind": ...}.'),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:FLAGS",
            help="Setting to grade, with streaming flags of `run`: 'small:--cache-mb 300'. "
            "{25%} is that share of the experts in MiB. Give it once for each.",
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="File with a setting a line, below a # line that states the question."),
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="FLAGS", help="What to compare with, as flags.")
    ] = "--resident",
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "-c",
            min=8,
            help="Context in tokens, and length of a chunk of text.",
            show_default="512, or the model's if smaller",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text to grade at most.")
    ] = DEFAULT_TOKENS,
    generate: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Also compare greedy generations of N tokens, from the prompts or else from the "
            "text's beginning.",
        ),
    ] = 0,
    prompt_through_decode: Annotated[
        bool,
        typer.Option(
            "--prompt-through-decode", help="Feed prompts token by token through decode, too."
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, help="Compute threads.", show_default="free cores"),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for finished pieces: the same command continues there.",
            show_default="a temporary one",
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    plot_to: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw bytes a token against perplexity: .png or .svg."),
    ] = None,
    ray: options.Ray = None,
) -> None:
    """Grade settings against a resident baseline: perplexity, divergence, answers, generations.

    Text is fed one token at a time through decode, so that a setting that changes decode is met by
    every token that it is graded on.

    \b
    routeahead eval model.gguf --text text.txt --setting "half:--cache-mb {50%}"
    routeahead eval model.gguf --prompts asked.jsonl --settings settings.txt
    """
    path = options.model_path(model)
    shards = [("a file of the model", shard) for shard in shard_paths(path)]
    read = {"the text": text, "the prompts": prompts, "the list of settings": settings}
    written = [one for one in (as_json, plot_to) if one]
    check_apart([*shards, *((what, one) for what, one in read.items() if one)], written)
    if plot_to:
        check_plot(plot_to)
        if not text:
            raise SettingsError("a plot shows perplexity: give --text")
    request = Request(
        path,
        text=text,
        prompts=prompts,
        context=context,
        max_tokens=max_tokens,
        generate=generate,
        prompt_through_decode=prompt_through_decode,
        threads=threads or default_threads(),
        baseline=llama_kwargs(baseline),
    )
    layout = read_layout(path)
    given = [*(read_list(settings)[1] if settings else []), *(setting or [])]
    graded = [parse_setting(argument, layout) for argument in given]
    for one in written:
        check_writable(one)
    options.announce(model)
    with _folder(work) as folder:
        evaluation = Evaluation(request, graded, folder)
        with Cluster(ray) if ray else contextlib.nullcontext() as cluster:
            summaries = _run(evaluation, folder, kept=work is not None, cluster=cluster)
    if as_json:
        write_json(as_json, report(request, summaries))
    if plot_to:
        plot(summaries, plot_to)
    for heading, named, columns in tables(summaries):
        print_table(heading, [one.name for one in named], columns)


def parse_setting(argument: str, layout: ModelLayout) -> Setting:
    """`NAME:FLAGS` as a setting.

    Raises:
        SettingsError: no name, or flags that make no sense.
    """
    name, colon, flags = argument.partition(":")
    if not colon:
        raise SettingsError(f"--setting {argument}: give NAME:FLAGS, as in 'small:--cache-mb 300'")
    try:
        [expanded] = expand_shares([flags], layout)
        return Setting(name.strip(), llama_kwargs(expanded)).validate()
    except SettingsError as error:
        raise SettingsError(f"--setting {name}: {error}") from None


def report(request: Request, summaries: Sequence[Summary]) -> dict[str, Any]:
    """What `--json` writes. Bytes, seconds, nats and shares of 1; the baseline comes first."""
    return {
        "model": str(request.model),
        "text": str(request.text) if request.text else None,
        "prompts": str(request.prompts) if request.prompts else None,
        "max_tokens": request.max_tokens,
        "generate": request.generate,
        "prompt_through_decode": request.prompt_through_decode,
        "threads": request.threads,
        "results": [summary.as_dict() for summary in summaries],
    }


Printed = tuple[str, Sequence[Summary], list[Column]]
"""A table: its heading, the settings that are its lines, and its columns."""


def tables(summaries: Sequence[Summary]) -> list[Printed]:
    """One on text and cost, and where there are any, one on answers and one on generations."""
    found = [("setting", summaries, _cost_columns(summaries))]
    if summaries[0].answers:
        found.append(("right answers", summaries, _answer_columns(summaries)))
    generated = [one for one in summaries if one.generations]
    if generated:
        found.append(("generations", generated, _generation_columns(generated)))
    return found


def _cost_columns(summaries: Sequence[Summary]) -> list[Column]:
    graded = summaries[0].text is not None
    quality = {
        "perplexity": ("perplexity", ".4f"),
        "KL mean": ("kl_mean", ".3g"),
        "median": ("kl_median", ".3g"),
        "p99": ("kl_p99", ".3g"),
        "top-1": ("agreement", ".2%"),
    }
    cost = [one.cost for one in summaries]
    return [
        *(
            Column(heading, [_shown(one.text, key, form) for one in summaries])
            for heading, (key, form) in (quality if graded else {}).items()
        ),
        Column("MiB/token", [f"{one['bytes_per_token'] / MIB:.1f}" for one in cost]),
        Column("hits", [_shown(one, "hit_rate", ".1%") for one in cost]),
        Column("ms/token", [f"{one['s_per_token'] * 1e3:.1f}" for one in cost]),
    ]


def _answer_columns(summaries: Sequence[Summary]) -> list[Column]:
    kinds = list(summaries[0].answers) if len(summaries[0].answers) > 1 else []
    whole = [f"{one.right}/{one.asked} ({one.right / one.asked:.1%})" for one in summaries]
    return [
        Column("all", whole),
        *(
            Column(kind or "no kind", ["/".join(map(str, one.answers[kind])) for one in summaries])
            for kind in kinds
        ),
    ]


def _generation_columns(summaries: Sequence[Summary]) -> list[Column]:
    found = [one.generations or {} for one in summaries]
    return [
        Column("equal", [f"{one['equal']}/{one['count']}" for one in found]),
        Column("equal positions", [f"{one['equal_share']:.1%}" for one in found]),
        Column("first divergence at", [_earliest(one["first_divergence"]) for one in found]),
    ]


def _earliest(divergences: Sequence[int | None]) -> str:
    starts = [index for index in divergences if index is not None]
    return f"{min(starts)} (median {statistics.median(starts):g})" if starts else "-"


def _shown(figures: dict[str, Any] | None, key: str, form: str) -> str:
    value = figures.get(key) if figures else None
    return "-" if value is None else format(value, form)


def _run(
    evaluation: Evaluation, folder: Path, kept: bool, cluster: Cluster | None
) -> list[Summary]:
    """Runs with a progress bar for each setting."""
    errors = console(stderr=True)
    if evaluation.logit_bytes and not cluster:
        size = f"{evaluation.logit_bytes / MIB:,.1f} MiB"
        errors.print(f"the baseline's logits take {size} of disk in {folder} until the end")
    with bars(errors) as show:
        try:
            return evaluation.spread(cluster, show) if cluster else evaluation.run(show)
        except KeyboardInterrupt:
            if kept:
                errors.print("interrupted: the same command continues from here")
            raise typer.Exit(130) from None


@contextlib.contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work:
        yield work
        return
    with tempfile.TemporaryDirectory(prefix="routeahead-eval-") as temporary:
        yield Path(temporary)
