"""`routeahead eval` as a command, and settings written as flags of `run`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.evaluations import CONTEXT
from support.library import Library
from typer.testing import CliRunner

from routeahead import Settings
from routeahead.cli import eval as eval_command
from routeahead.cli.flags import llama_kwargs
from routeahead.errors import SettingsError

pytest_plugins = ["support.eval_fixtures"]


def test_flags_are_those_of_run() -> None:
    plain = llama_kwargs("")
    assert plain == Settings().as_dict()  # every setting has a flag, with the same default
    assert plain["cache_mb"] == "auto" and plain["overlap"] and not plain["resident"]
    given = llama_kwargs("--cache-mb 300 --no-overlap --io-threads 3 --force-cache")
    changed = {"cache_mb": 300, "overlap": False, "io_threads": 3, "force_cache": True}
    assert given == plain | changed
    assert llama_kwargs("--resident") == plain | {"resident": True}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--cash-mb 3", "No such option: --cash-mb"),
        ("-n 3", "No such option: -n"),
        ("--prompt hello", "No such option: --prompt"),
        ("--csv rows.csv", "No such option: --csv"),
        ("--help", "No such option: --help"),
        ("model.gguf", "unexpected extra argument"),
        ("--cache-mb", "requires an argument"),
        ("--cache-mb lots", "give a size such as"),
        ("--io-threads x", "Invalid value for '--io-threads'"),
        ("--io-threads 0", "give 1 to 64"),
        ("--resident --cache-mb 3", "resident streams nothing"),
        ("--dense 'anon", "No closing quotation"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(reason)) as caught:
        llama_kwargs(flags)
    assert "\n" not in str(caught.value)


def run_command(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(eval_command.evaluate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command(library: Library, text: Path, prompts: Path, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    result = run_command(
        library.path("mixtral"),
        *("--text", text, "--prompts", prompts, "--generate", 5, "-c", CONTEXT, "-t", 1),
        *("--setting", "plain:--cache-mb 0", "--setting", "whole:--resident"),
        *("--json", figures, "--plot", picture),
    )
    assert result.exit_code == 0, result.output
    assert "100.00%" in result.stdout and "1/3 (33.3%)" in result.stdout
    assert "logits take 0.1 MiB of disk" in result.stderr
    report = json.loads(figures.read_text())
    assert [one["name"] for one in report["results"]] == ["baseline", "plain", "whole"]
    assert report["results"][1]["text"]["kl_mean"] == 0
    assert report["results"][1]["settings"]["cache_mb"] == 0
    drawn = picture.read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("plain", "whole", "perplexity"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--setting", "--cache-mb 0"], "give NAME:FLAGS"),
        (["--setting", "a:--cash 0"], "--setting a: '--cash 0': No such option"),
        (["--baseline", "-n 3"], "No such option: -n"),
        (["--plot", "x.gif"], "give a plot a name that ends in .png or .svg"),
        (["--json", "no/such/folder.json"], "cannot be written"),
        (["--json", "."], "cannot be written"),
    ],
)
def test_wrong_arguments(library: Library, text: Path, arguments: list[str], reason: str) -> None:
    result = run_command(library.path("qwen3moe"), "--text", text, *arguments)
    assert isinstance(result.exception, SettingsError) and reason in str(result.exception)


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, library: Library, text: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it now fails
    result = run_command(library.path("qwen3moe"), "--text", text, "--plot", "x.png")
    assert isinstance(result.exception, SettingsError)
    assert "pip install 'routeahead[plot]'" in str(result.exception)
