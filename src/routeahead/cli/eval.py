"""`routeahead eval`: what settings cost in quality, beside a baseline."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from routeahead.bench.cells import expand_shares, read_list
from routeahead.cli import options
from routeahead.cli.flags import llama_kwargs
from routeahead.errors import SettingsError
from routeahead.evaluation.evaluate import DEFAULT_TOKENS, Evaluation, Request, Setting
from routeahead.evaluation.plot import check_plot, plot
from routeahead.evaluation.summary import Summary
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.machine.cpus import default_threads
from routeahead.models import DEFAULT_MODEL
from routeahead.telemetry.json_file import write_json


def evaluate(
    model: options.Model = DEFAULT_MODEL,
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
) -> None:
    """Grade settings against a resident baseline: perplexity, divergence, answers, generations.

    Text is fed one token at a time through decode, so that a setting that changes decode is met by
    every token that it is graded on.
    """
    if plot_to:
        check_plot(plot_to)
        if not text:
            raise SettingsError("a plot shows perplexity: give --text")
    request = Request(
        model,
        text=text,
        prompts=prompts,
        context=context,
        max_tokens=max_tokens,
        generate=generate,
        prompt_through_decode=prompt_through_decode,
        threads=threads or default_threads(),
        baseline=llama_kwargs(baseline),
    )
    layout = read_layout(model)
    given = [*(read_list(settings)[1] if settings else []), *(setting or [])]
    graded = [parse_setting(argument, layout) for argument in given]
    for path in (as_json, plot_to):
        if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise SettingsError(f"{path}: cannot write a file there")
    with _folder(work) as folder:
        summaries = _run(Evaluation(request, graded, folder), folder, kept=work is not None)
    if as_json:
        write_json(as_json, report(request, summaries))
    if plot_to:
        plot(summaries, plot_to)
    console = Console(soft_wrap=True)
    for table in tables(summaries):
        console.print(table)


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


def tables(summaries: Sequence[Summary]) -> list[Table]:
    """One on text and cost, and where there are any, one on answers and one on generations."""
    found = [_cost_table(summaries)]
    if summaries[0].answers:
        found.append(_answer_table(summaries))
    if any(one.generations for one in summaries):
        found.append(_generation_table(summaries))
    return found


def _cost_table(summaries: Sequence[Summary]) -> Table:
    graded = summaries[0].text is not None
    quality = ("perplexity", "KL mean", "median", "p99", "top-1") if graded else ()
    table = _table("setting", *quality, "MiB/token", "hits", "ms/token")
    for one in summaries:
        text, cost = one.text, one.cost
        cells = [
            _shown(text, "perplexity", ".4f"),
            *(_shown(text, key, ".3g") for key in ("kl_mean", "kl_median", "kl_p99")),
            _shown(text, "agreement", ".2%"),
        ]
        table.add_row(
            one.name,
            *(cells if graded else ()),
            f"{cost['bytes_per_token'] / MIB:.1f}",
            _shown(cost, "hit_rate", ".1%"),
            f"{cost['s_per_token'] * 1e3:.1f}",
        )
    return table


def _answer_table(summaries: Sequence[Summary]) -> Table:
    kinds = list(summaries[0].answers) if len(summaries[0].answers) > 1 else []
    table = _table("right answers", "all", *(kind or "no kind" for kind in kinds))
    for one in summaries:
        by_kind = (one.answers[kind] for kind in kinds)
        table.add_row(
            one.name,
            f"{one.right}/{one.asked} ({one.right / one.asked:.1%})",
            *(f"{right}/{asked}" for right, asked in by_kind),
        )
    return table


def _generation_table(summaries: Sequence[Summary]) -> Table:
    table = _table("generations", "equal", "equal positions", "first divergence at")
    for one in summaries:
        if not one.generations:
            continue
        starts = [index for index in one.generations["first_divergence"] if index is not None]
        earliest = f"{min(starts)} (median {statistics.median(starts):g})" if starts else "-"
        table.add_row(
            one.name,
            f"{one.generations['equal']}/{one.generations['count']}",
            f"{one.generations['equal_share']:.1%}",
            earliest,
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    table.add_column(first, style="bold")
    for header in others:
        table.add_column(header, justify="right")
    return table


def _shown(figures: dict[str, Any] | None, key: str, form: str) -> str:
    value = figures.get(key) if figures else None
    return "-" if value is None else format(value, form)


def _run(evaluation: Evaluation, folder: Path, kept: bool) -> list[Summary]:
    """Runs with a progress bar for each setting."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    if evaluation.logit_bytes:
        size = f"{evaluation.logit_bytes / MIB:,.1f} MiB"
        errors.print(f"the baseline's logits take {size} of disk in {folder} until the end")
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        try:
            return evaluation.run(show)
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
