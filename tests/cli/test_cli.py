"""The commands as a user runs them.

Where the process is the point (its streams, its status, signals, what it leaves behind), in one of
their own; elsewhere in this one, which spares the second that importing llama.cpp takes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.commands import Command, Done
from support.library import Library

from routeahead.llamacpp.gguf_file import read_layout
from routeahead.models import DEFAULT_MODEL

EMBEDDED = read_layout(DEFAULT_MODEL)
COMMAND = [sys.executable, "-m", "routeahead.cli.main"]


Reporting = Callable[..., tuple[dict[str, Any], str]]


def process(*arguments: object) -> Done:
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def with_report(command: Command, path: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    done = command("run", *arguments, "--report", path, "-t", 1)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stderr


@pytest.fixture
def run(command: Command, tmp_path: Path) -> Reporting:
    """`routeahead run` in this process → its report, and what it printed beside the text."""
    return lambda *arguments: with_report(command, tmp_path / "report.json", *arguments)


def assert_one_line_error(done: Done, *words: str) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("routeahead: "), done.stderr
    for word in words:
        assert word in lines[0]


def test_streamed_run_equals_resident_run(tmp_path: Path) -> None:
    common = ("-p", "Once upon a time", "--raw", "-n", 24)
    path = tmp_path / "report.json"
    resident, _ = with_report(process, path, *common, "--resident")
    streamed, summary = with_report(process, path, *common, "--cache-mb", 0)
    assert streamed["tokens"] == resident["tokens"] and len(streamed["tokens"]) == 24
    assert streamed["text"] == resident["text"]
    assert streamed["prompt_tokens"] == resident["prompt_tokens"] > 0
    for line in ("moe-stream: ", "moe-cache: ", "moe-overlap: "):
        assert line in summary

    counters = streamed["counters"]
    decoded = 23  # the last token is sampled and not evaluated
    slots = len(EMBEDDED.moe_layers) * EMBEDDED.n_expert_used
    assert counters["misses"] > counters["decode_misses"] == decoded * slots
    assert counters["hits"] == 0 and counters["evictions"] > 0 and counters["rereads"] > 0
    most = counters["misses"] + counters["ahead_unused"]  # of some, not all parts were read
    assert counters["bytes_read"] > counters["ahead_bytes"] > 0
    assert 3 * counters["misses"] <= counters["reads"] <= 3 * most
    parts = ("compute_s_per_token", "stall_s_per_token", "mgmt_s_per_token")
    assert counters["s_per_token"] == pytest.approx(sum(counters[part] for part in parts))
    for key in ("load_s", "first_token_s", "io_s_per_token", "cpu_s_per_token", "peak_rss_bytes"):
        assert counters[key] > 0


def test_route_ahead_reports_what_it_did(run: Reporting) -> None:
    arguments = ("-p", "Once upon a time", "--raw", "-n", 24, "--cache-mb", 2, "--force-cache")
    report, summary = run(*arguments, "--route-ahead", 2)
    facts, prefetch = report["route_ahead"], report["prefetch"]
    decoded, layers = 23, len(EMBEDDED.moe_layers)
    assert facts["depth"] == 2 and facts["committed"] == decoded * (layers - 2)
    assert facts["committed"] + sum(facts["by_reason"].values()) == (decoded + 1) * layers
    assert facts["passed_through"] == 0 and facts["disarmed"] == ""
    assert facts["slots"] == 4 * facts["committed"] > facts["agreed_slots"] > 0
    assert facts["agreed_slots"] == sum(one["agreed_slots"] for one in facts["by_layer"].values())
    assert prefetch["source"] == "route-ahead" and prefetch["bytes"] > 0
    assert prefetch["issued"] == prefetch["useful"] > 0
    assert prefetch["landed"] <= prefetch["completed"] <= prefetch["issued"]
    for name in ("gemv", "issue", "watchdog"):
        assert facts[f"{name}_ms_per_tok"] > 0
    assert facts["wait_ms_per_tok"] == 0 <= facts["adopt_ms_per_tok"]
    agreed = facts["agreed_slots"] / facts["slots"]
    useful = prefetch["useful"]
    for line in (
        f"moe-route-ahead: 2 layers early — {facts['committed']} routings committed, 0 passed "
        f"through; committed selection agreed with the router on {agreed:.1%} of slots",
        f"MiB ahead, {useful}/{useful} experts useful (100.0%); when their layer came",
        "ra_gemv_ms/tok",
        "ra_issue_ms/tok",
    ):
        assert line in summary
    plain, _ = run(*arguments)
    assert "route_ahead" not in plain and "prefetch" not in plain


@pytest.mark.parametrize(
    ("flags", "key", "line"),
    [
        ("--drop-cold-experts 1", "drop", "moe-drop: {dropped}/{routed} ("),
        ("--expert-substitute 0.1", "substitute", "moe-substitute: {substituted}/{slots} slots ("),
        ("--prefetch 2", "prefetch", "{useful}/{issued} experts useful ("),
        ("--predict-prefetch", "predict_prefetch", "moe-predict: the next layer's router"),
        ("--predict-log", "predictors", "moe-predict-log: slot overlap"),
    ],
)
def test_policies_report_what_they_did(run: Reporting, flags: str, key: str, line: str) -> None:
    arguments = ("-p", "Once upon a time", "--raw", "-n", 24, "--cache-mb", 1, "--force-cache")
    report, summary = run(*arguments, *flags.split())
    assert line.format(**report[key]) in summary
    if key == "predictors":
        assert report[key]["control"]["overlap"] == report[key]["control"]["accuracy"] == 1.0
        assert "CONTROL IS OFF" not in summary
        stale = report[key]["stale gate 4"]["by_layer"]
        assert stale["0"]["overlap"] is None and 0 < stale["5"]["overlap"] < 1
        assert re.search(r"^ +0 +100\.0% +- +- ", summary, re.MULTILINE)
    elif key == "drop":
        assert report[key]["threshold"] == 0.25
        assert 0 < report[key]["dropped"] < report[key]["routed"]


@pytest.mark.fast
def test_text_goes_to_stdout_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = process("run", "-p", "Once", "--raw", "-n", 8, "-t", 1, "--report", path)
    report = json.loads(path.read_text())
    assert done.returncode == 0 and len(report["tokens"]) == 8
    assert done.stdout == report["text"] + "\n"
    assert "moe-stream" not in done.stdout


def test_forced_tokens_are_the_same_in_every_run(run: Reporting, tmp_path: Path) -> None:
    runs = [
        run("--forced-tokens", "seed:7", "-n", 12, *more)[0]
        for more in ((), ("--cache-mb", 0), ("--resident",))
    ]
    assert runs[0]["tokens"] == runs[1]["tokens"] == runs[2]["tokens"]
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(map(str, runs[0]["tokens"])))
    assert run("--forced-tokens", ids)[0]["tokens"] == runs[0]["tokens"]


def test_inspect(command: Command, library: Library) -> None:
    done = command("inspect", library.path("mixed", 4))
    assert done.returncode == 0, done.stderr
    for fact in ("qwen3moe, 4 file(s)", "10 a layer, top-3", "Q6_K in 3 layers", "fits here"):
        assert fact in done.stdout


def test_prompt_file(run: Reporting, command: Command, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time")
    from_file, _ = run("--prompt-file", prompt, "-n", 8)
    inline, _ = run("-p", "Once upon a time", "-n", 8)
    assert from_file["tokens"] == inline["tokens"]
    assert_one_line_error(command("run", "--prompt-file", tmp_path / "none"), "cannot read")


# --- a user's mistakes ---


def broken_magic(tmp_path: Path, library: Library) -> Path:
    path = tmp_path / "text.gguf"
    path.write_text("This is no model.")
    return path


def truncated_data(tmp_path: Path, library: Library) -> Path:
    path = tmp_path / "short.gguf"
    path.write_bytes(library.path("qwen3moe").read_bytes()[:-5000])
    return path


def truncated_header(tmp_path: Path, library: Library) -> Path:
    path = tmp_path / "header.gguf"
    path.write_bytes(library.path("qwen3moe").read_bytes()[:3000])
    return path


def missing_shard(tmp_path: Path, library: Library) -> Path:
    first = library.path("qwen3moe", 4)
    target = tmp_path / first.name
    target.write_bytes(first.read_bytes())
    return target


def renamed_shard(tmp_path: Path, library: Library) -> Path:
    target = tmp_path / "alone.gguf"
    target.write_bytes(library.path("qwen3moe", 4).read_bytes())
    return target


def with_value(key: str, value: int) -> Callable[[Path, Library], Path]:
    """A model of which one count is another."""

    def make(tmp_path: Path, library: Library) -> Path:
        path = tmp_path / "counts.gguf"
        path.write_bytes(library.path("qwen3moe").read_bytes())
        field = gguf.GGUFReader(path, "r+").fields[f"qwen3moe.{key}"]
        field.parts[field.data[0]][0] = value
        return path

    return make


def pipe(tmp_path: Path, library: Library) -> Path:
    os.mkfifo(tmp_path / "pipe.gguf")
    return tmp_path / "pipe.gguf"


FILES: list[tuple[Callable[[Path, Library], Path], tuple[str, ...]]] = [
    (broken_magic, ("not a GGUF file",)),
    (truncated_data, ("truncated", "download it again")),
    (truncated_header, ("malformed or truncated",)),
    (missing_shard, ("shard missing", "-00002-of-00004")),
    (renamed_shard, ("one of 4 shards",)),
    (with_value("expert_used_count", 0), ("expert_used_count is 0",)),
    (with_value("expert_used_count", 17), ("expert_used_count is 17", "16 experts")),
    (with_value("expert_count", 0), ("expert_count is 0",)),
    (with_value("expert_count", 1000000), ("expert_count is 1000000",)),
    (with_value("block_count", 0), ("block_count is 0",)),
    (with_value("block_count", 1 << 20), ("block_count is 1048576",)),
    (pipe, ("no regular file",)),
    (lambda tmp, _: tmp, ("is a folder",)),
    (lambda tmp, _: tmp / "absent.gguf", ("No such file",)),
]


@pytest.mark.fast
@pytest.mark.parametrize(("make", "words"), FILES)
def test_unusable_file(
    command: Command,
    tmp_path: Path,
    library: Library,
    make: Callable[..., Path],
    words: tuple[str, ...],
) -> None:
    path = make(tmp_path, library)
    assert_one_line_error(command("run", path, "-p", "x"), str(tmp_path), *words)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cache-mb", "much"), ("--cache-mb much", "auto")),
        (("--cache-mb", "-3"), ("cache_mb is -3",)),
        (("--ubatch", "lots"), ("--ubatch lots", "a number of rows", "auto")),
        (("--ubatch", "0"), ("ubatch is 0",)),
        (("--resident", "--cache-mb", "9"), ("resident streams nothing",)),
        (("--resident", "--no-overlap"), ("resident streams nothing",)),
        (("--dense", "disk"), ("dense is 'disk'",)),
        (("--io-threads", "0"), ("io_threads is 0",)),
        (("--force-cache",), ("force_cache",)),
        (("--n-expert-used", "99"), ("n_expert_used is 99: the model has 32",)),
        (("--route-ahead", "-1"), ("route_ahead is -1",)),
        (("--resident", "--route-ahead", "1"), ("resident streams nothing",)),
        (("--router-precision", "f8"), ("router_precision is 'f8'", "'int8'")),
        (("--throttle-latency-ms", "3"), ("has no effect without throttle",)),
        (("--report", "/nowhere/report.json"), ("cannot be written",)),
        (("--csv", "/nowhere/steps.csv"), ("cannot be written",)),
        (("--forced-tokens", "/nowhere/ids"), ("cannot read token ids",)),
        (("--forced-tokens", "seed:x"), ("seed:NUMBER",)),
        (("--replay-routing", "/nowhere/trace.csv"), ("/nowhere/trace.csv",)),
        (("--prompt-file", "x"), ("not both",)),
        (("--report", str(DEFAULT_MODEL)), ("is a file of the model",)),
        (("--csv", "/tmp/one.csv", "--io-trace", "/tmp/../tmp/one.csv"), ("written already",)),
        (("--resident", "--csv", "steps.csv"), ("are about streaming",)),
        (("--throttle", "nan"), ("cannot be negative",)),
        (("--forced-tokens", "/dev/null"), ("no token ids",)),
    ],
)
def test_contradictory_arguments(
    command: Command, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = command("run", "-p", "a prompt that is long", "-t", 1, *arguments)
    assert_one_line_error(done, *words)


def test_a_full_disk_names_the_file(command: Command) -> None:
    arguments = ("-p", "x", "--raw", "-n", 100, "-t", 1, "--csv", "/dev/full")
    assert_one_line_error(command("run", DEFAULT_MODEL, *arguments), "/dev/full: ", "No space left")


def test_exit_status_of_the_process(tmp_path: Path) -> None:
    """1 for what the user can mend, 2 for a wrong command line."""
    assert_one_line_error(process("run", tmp_path / "absent.gguf", "-p", "x"), "No such file")
    wrong = process("run", "--no-such-option")
    assert wrong.returncode == 2 and "No such option" in wrong.stderr


def test_prompt_longer_than_context(command: Command) -> None:
    assert_one_line_error(command("run", "-p", "x" * 300, "-c", 256), "the prompt has", "256")


def test_reports_follow_links_and_devices(command: Command, tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    done = command("run", "-p", "Once", "-n", 2, "-t", 1, "--report", link)
    assert done.returncode == 0 and link.is_symlink()
    assert len(json.loads(target.read_text())["tokens"]) == 2
    done = process("run", "-p", "Once", "-n", 2, "-t", 1, "--report", "/dev/stdout")
    assert done.returncode == 0 and '"prompt_tokens"' in done.stdout


def test_bytes_that_are_no_text_are_a_prompt_too(command: Command) -> None:
    done = command("run", "-p", os.fsdecode(b"\xff\xfe"), "-n", 2, "-t", 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.xdist_group("machine")
def test_interrupt_still_writes_the_report(run: Reporting, tmp_path: Path) -> None:
    two_tokens = run("-p", "Once", "--raw", "-n", 2)[0]["text"]
    report = tmp_path / "report.json"
    # The dense weights are mapped, so that the throttle does not hold up the load.
    arguments = ["run", "-p", "Once", "--raw", "-n", "4000", "--cache-mb", "0", "--throttle", "3"]
    arguments += ["--dense", "mmap"]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--report", str(report), "-t", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    # Two tokens are out; at 3 MiB/s the next one takes a third of a second.
    assert process.stdout.read(len(two_tokens)) == two_tokens
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors
    written = json.loads(report.read_text())
    assert written["interrupted"] and 2 <= len(written["tokens"]) <= 5


@pytest.mark.parametrize("more", ["", ", route_ahead=1, route_ahead_compute='worker'"])
def test_a_model_that_nobody_closes_does_not_keep_the_process(tmp_path: Path, more: str) -> None:
    trace = tmp_path / "io.csv"
    code = (
        "from pathlib import Path; from routeahead import Llama; "
        "from routeahead.models import DEFAULT_MODEL; "
        "from routeahead.telemetry.recorder import Outputs; "
        f"llm = Llama(DEFAULT_MODEL, n_ctx=64, outputs=Outputs(io_trace=Path('{trace}')){more}); "
        "llm.eval([5])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(trace.read_text().splitlines()) > 10  # written to the end


def test_default_model_is_small() -> None:
    assert DEFAULT_MODEL.stat().st_size < 32 << 20
