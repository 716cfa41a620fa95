"""`routeahead run`: what it asks the model, how it samples, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command, Done
from support.library import Library, csv_rows

from routeahead.cli.options import mib
from routeahead.models import DEFAULT_MODEL

SUM = "What is 12 + 7?"
# The embedded model goes on with this for ever.
LOOP = "In the beginning God created the heaven and the earth. And the earth was"


def process(*arguments: object, text: bytes = b"", **environment: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "routeahead", *map(str, arguments)],
        input=text,
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    out, err = done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


@pytest.fixture
def command(command: Command) -> Command:
    """The command in this process, with one compute thread for `run`."""
    return lambda verb, *rest: command(verb, *rest, *(("-t", 1) if verb == "run" else ()))


@pytest.fixture
def report(command: Command, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def call(*arguments: object) -> dict[str, Any]:
        path = tmp_path / "report.json"
        done = command("run", *arguments, "--report", path)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    return call


def refused(done: Done, *words: str) -> None:
    assert done.returncode == 1, done.stderr
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("routeahead: ") and all(word in line for word in words), line


# --- the prompt ---


@pytest.mark.fast
def test_a_question_is_asked_in_the_models_chat_template(command: Command) -> None:
    done = command("run", "-p", SUM)
    assert (done.returncode, done.stdout) == (0, "19\n"), done.stderr
    raw = command("run", "-p", SUM, "--raw", "-n", 8)
    assert raw.stdout != done.stdout


def test_raw_is_the_text_alone(report: Callable[..., dict[str, Any]]) -> None:
    spelt = f"<|im_start|>user\n{SUM}<|im_end|>\n<|im_start|>assistant\n"
    asked, continued = report("-p", SUM), report("-p", spelt, "--raw")
    assert asked["tokens"] == continued["tokens"]
    assert (
        asked["prompt_tokens"]
        == continued["prompt_tokens"]
        > report("-p", SUM, "--raw")["prompt_tokens"]
    )


def test_a_system_message_comes_first(report: Callable[..., dict[str, Any]]) -> None:
    spelt = (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{SUM}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with_system = report("-p", SUM, "--system", "Be brief.", "-n", 4)
    assert with_system["prompt_tokens"] == report("-p", spelt, "--raw", "-n", 4)["prompt_tokens"]


def test_a_model_without_a_template_continues_the_text(
    command: Command, library: Library, tmp_path: Path
) -> None:
    path = tmp_path / "plain.gguf"
    content, key = library.path("qwen3moe").read_bytes(), b"tokenizer.chat_template"
    assert content.count(key) == 1
    path.write_bytes(content.replace(key, key[:-1] + b"X"))
    plain, raw = (command("run", path, "-p", "ab", "-n", 4, *more) for more in ((), ("--raw",)))
    assert plain.stdout == raw.stdout and plain.returncode == 0
    refused(command("run", path, "-p", "ab", "--system", "x"), "--system", "has none")


@pytest.mark.parametrize(
    "content",
    [SUM, f"{SUM}\n", f"{SUM}\r\n", f"\ufeff{SUM}\n"],
    ids=["plain", "newline", "crlf", "bom"],
)
def test_a_files_last_newline_and_mark_are_no_part_of_a_question(
    report: Callable[..., dict[str, Any]], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "question.txt"
    path.write_bytes(content.encode())
    asked = report("--prompt-file", path)
    assert asked["text"] == "19" and asked["prompt_tokens"] == report("-p", SUM)["prompt_tokens"]


@pytest.mark.parametrize("flags", [[], ["--prompt-file", "-"]])
def test_what_is_piped_in_is_the_prompt(flags: list[str]) -> None:
    done = process("run", "-t", 1, *flags, text=SUM.encode() + b"\n")
    assert (done.returncode, done.stdout) == (0, "19\n"), done.stderr


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_text_is_utf8_whatever_the_locale(locale: str) -> None:
    """The answer has an é, and comes as UTF-8."""
    question = "Translate to French: zero"
    flags = {"LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = process("run", "-t", 1, text=f"{question}\n".encode(), **flags)
    assert (done.returncode, done.stdout) == (0, "zéro\n"), done.stderr
    echo = process("run", "-t", 1, "-p", "é", "--raw", "-n", 1, "--report", "/dev/stdout", **flags)
    assert echo.returncode == 0, echo.stderr
    plain = process("run", "-t", 1, "-p", "é", "--raw", "-n", 1, "--report", "/dev/stdout")
    tokens = [json.loads(one.stdout[one.stdout.index("{") :])["tokens"] for one in (echo, plain)]
    assert tokens[0] == tokens[1]


def test_a_missing_prompt_is_said_before_the_load(command: Command, tmp_path: Path) -> None:
    refused(process("run", tmp_path / "absent.gguf"), "the prompt is empty")
    path = tmp_path / "latin.txt"
    path.write_bytes("é".encode("latin-1"))
    refused(command("run", tmp_path / "absent.gguf", "--prompt-file", path), "cannot read", "utf-8")


# --- sampling ---


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_repeats(report: Callable[..., dict[str, Any]], seed: int) -> None:
    asked = ("-p", "In the beginning", "--raw", "-n", 16, "--temp", 1.5)
    first, second = (report(*asked, "--seed", seed) for _ in range(2))
    assert first["tokens"] == second["tokens"] and first["settings"]["seed"] == seed


def test_without_a_seed_runs_differ_and_tell_their_seed(
    report: Callable[..., dict[str, Any]], command: Command
) -> None:
    asked = ("-p", "In the beginning", "--raw", "-n", 16, "--temp", 1.5)
    first, second = report(*asked), report(*asked)
    assert first["tokens"] != second["tokens"]
    assert first["settings"]["seed"] != second["settings"]["seed"]
    again = report(*asked, "--seed", first["settings"]["seed"])
    assert again["tokens"] == first["tokens"]
    assert "temperature 1.5, seed 5\n" in command("run", *asked, "--seed", 5).stderr


def test_options_of_sampling_reach_the_sampler(
    report: Callable[..., dict[str, Any]], command: Command
) -> None:
    asked = ("-p", LOOP, "--raw", "-n", 12)
    greedy = report(*asked)["tokens"]
    hot = ("--temp", 1.8, "--seed", 1)
    assert report(*asked, *hot)["tokens"] != greedy
    for flags in (("--top-k", 1), ("--top-p", 0), ("--min-p", 1)):
        assert report(*asked, *hot, *flags)["tokens"] == greedy, flags
    assert report(*asked, "--repeat-penalty", 3)["tokens"] != greedy
    refused(command("run", *asked, "--top-k", 5), "--top-k", "--temp")


def test_output_ends_before_a_stop_text(report: Callable[..., dict[str, Any]]) -> None:
    asked = ("-p", "Translate to French: seven hundred ninety eight")
    whole = report(*asked)["text"]
    assert whole == "sept cent quatre-vingt-dix-huit"
    assert report(*asked, "--stop", "-vingt")["text"] == "sept cent quatre"
    # Its beginning is held back, and given when something else follows.
    assert report(*asked, "--stop", "-vingts")["text"] == whole
    assert report(*asked, "--stop", "huit!", "--stop", "cent q")["text"] == "sept "


def test_output_follows_a_grammar_or_a_schema(
    report: Callable[..., dict[str, Any]], command: Command, tmp_path: Path
) -> None:
    grammar, schema = tmp_path / "answer.gbnf", tmp_path / "answer.json"
    grammar.write_text('root ::= "yes" | "no"')
    schema.write_text('{"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"]}')
    assert report("-p", SUM, "--grammar", grammar)["text"] in ("yes", "no")
    assert json.loads(report("-p", SUM, "--json-schema", schema)["text"]) == {"a": 5}
    grammar.write_text("root ::= (")
    refused(command("run", "-p", SUM, "--grammar", grammar), str(grammar), "does not understand")
    schema.write_text("{")
    refused(command("run", "-p", SUM, "--json-schema", schema), str(schema), "cannot be used")


# --- what it says ---


@pytest.mark.fast
def test_a_forgotten_model_is_said(command: Command) -> None:
    assert "the built-in one" in command("run", "-p", SUM, "-n", 1).stderr
    assert "built-in" not in command("run", DEFAULT_MODEL, "-p", SUM, "-n", 1).stderr
    assert "built-in" in command("inspect").stdout


def test_one_token_has_no_figures_of_a_decode(command: Command) -> None:
    done = command("run", DEFAULT_MODEL, "-p", SUM, "-n", 1)
    assert "output 1 token\n" in done.stderr and "tok/s)" in done.stderr
    assert "0 tokens" not in done.stderr and "moe-token" not in done.stderr
    for word in ("load ", "total ", "peak "):
        assert word in done.stderr


def test_a_full_context_and_a_long_one_are_said(command: Command) -> None:
    full = command("run", "-p", LOOP, "--raw", "-n", 400, "-c", 256)
    assert full.returncode == 0 and "the context of 256 tokens is full before -n 400" in full.stderr
    long = command("run", "-p", SUM, "-n", 1, "-c", 4096)
    assert "-c 4096 is more than the 1024" in long.stderr


def test_tables_and_errors_take_names_as_they_are(command: Command, tmp_path: Path) -> None:
    strange = tmp_path / "[bold]x\x1b[31m.gguf"
    refused(command("run", strange, "-p", "x"), "[bold]x\\x1b[31m.gguf", "No such file")
    strange.write_bytes(DEFAULT_MODEL.read_bytes())
    shown = command("inspect", strange)
    assert "[bold]x\\x1b[31m.gguf" in shown.stdout and "\x1b" not in shown.stdout


def test_inspect_as_json(command: Command) -> None:
    facts = json.loads(command("inspect", DEFAULT_MODEL, "--json").stdout)
    assert facts["arch"] == "qwen3moe" and facts["experts"] == 32 and facts["top_k"] == 4
    assert sum(facts["expert_bytes_by_layer"].values()) * 32 == facts["expert_bytes"]
    assert "KiB" in command("inspect", DEFAULT_MODEL).stdout  # an expert, and not 0.0 MiB


@pytest.mark.parametrize(
    ("text", "size"),
    [("4000", 4000), ("4000M", 4000), ("4G", 4096), ("3.5GiB", 3584), ("1 t", 1 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert mib(text) == size


def test_sizes_reach_the_cache(command: Command) -> None:
    assert "moe-cache: 5 MiB" in command("run", "-p", SUM, "-n", 1, "--cache-mb", "5M").stderr
    refused(command("run", "-p", SUM, "--cache-mb", "4K"), "--cache-mb 4K", "4G")


def test_the_package_is_a_command() -> None:
    assert process("--version").stdout.startswith("routeahead ")
    typed = {"COMP_WORDS": "routeahead in", "COMP_CWORD": "1"}
    completed = process(_ROUTEAHEAD_COMPLETE="complete_bash", **typed)
    assert completed.stdout.strip() == "inspect"
    wrong = process("rn")
    assert wrong.returncode == 2 and "No such command" in wrong.stderr


@pytest.mark.parametrize("verb", ["run", "inspect", "bench", "eval", "replay", "io-report"])
def test_help_has_examples(command: Command, verb: str) -> None:
    assert f"routeahead {verb} " in command(verb, "--help").stdout.partition("Usage")[2][60:]


# --- outputs stay apart from inputs ---


def test_an_output_is_no_input(command: Command, tmp_path: Path) -> None:
    trace = tmp_path / "routes.csv"
    assert command("run", "-p", SUM, "-n", 3, "--route-trace", trace).returncode == 0
    recorded = trace.read_bytes()
    linked = tmp_path / "linked.csv"
    os.link(trace, linked)
    for written in (trace, linked):
        replayed = ("--replay-routing", trace, "--route-trace", written)
        refused(command("run", "-p", SUM, *replayed), "is the recorded routing")
    ids, prompt = tmp_path / "ids.txt", tmp_path / "prompt.txt"
    ids.write_text("5 6 7")
    prompt.write_text(SUM)
    model = tmp_path / "model.gguf"
    os.link(DEFAULT_MODEL, model) if _same_disk(tmp_path) else model.symlink_to(DEFAULT_MODEL)
    for flags, what in (
        (("--forced-tokens", ids, "--csv", ids), "the forced tokens"),
        (("--prompt-file", prompt, "--report", prompt), "the prompt"),
        (("-p", "x", "--csv", model), "a file of the model"),
        (("-p", "x", "--csv", linked, "--io-trace", trace), "written already"),
    ):
        refused(command("run", DEFAULT_MODEL, *flags), f"is {what}")
    assert trace.read_bytes() == recorded
    assert (ids.read_text(), prompt.read_text()) == ("5 6 7", SUM)
    assert model.read_bytes() == DEFAULT_MODEL.read_bytes()


def _same_disk(folder: Path) -> bool:
    return folder.stat().st_dev == DEFAULT_MODEL.stat().st_dev


@pytest.mark.fast
def test_the_engine_keeps_them_apart_too(tmp_path: Path) -> None:
    from routeahead import Llama, SettingsError
    from routeahead.telemetry.recorder import Outputs

    trace = tmp_path / "routes.csv"
    trace.write_text("recorded")
    with pytest.raises(SettingsError, match="is the recorded routing"):
        Llama(DEFAULT_MODEL, replay_routing=trace, outputs=Outputs(route_trace=trace))
    assert trace.read_text() == "recorded"


def test_lookup_is_counted(report: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Guesses save batches, change no text, and the report says what they cost and brought."""
    arguments = ("-p", LOOP, "--raw", "-n", 40, "--cache-mb", 2)
    plain = report(*arguments)
    csv = tmp_path / "steps.csv"
    found = report(*arguments, "--lookup", 8, "--csv", csv)
    assert found["text"] == plain["text"]
    counters, steps = found["counters"], found["decode_steps"]
    assert 0 < counters["accepted"] <= counters["drafted"] and counters["draft_bytes"] > 0
    assert len(steps["wall_s"]) < 30 and sum(steps["kept"]) >= 39
    assert sum(steps["kept"]) == len(steps["kept"]) + counters["accepted"]
    rows = csv_rows(csv)
    assert [int(row["accepted"]) + 1 for row in rows] == steps["kept"]
    assert int(rows[-1]["token"]) == sum(steps["kept"])
    assert sum(int(row["drafted"]) for row in rows) == counters["drafted"]
    assert plain["counters"]["drafted"] == 0


def test_lookup_in_a_terminal(command: Command) -> None:
    done = command("run", "-p", LOOP, "--raw", "-n", 40, "--cache-mb", 2, "--lookup", 8)
    line = next(one for one in done.stderr.splitlines() if one.startswith("moe-draft: "))
    assert "guessed tokens right" in line and "MiB a token there" in line
    refused(command("run", "-p", "x", "--lookup", 8, "--forced-tokens", "seed:1"), "--lookup")
