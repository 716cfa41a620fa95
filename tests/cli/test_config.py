"""`config.toml` and `ROUTEAHEAD_*`: which value wins, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from support.commands import Command, Done

from routeahead.models import DEFAULT_MODEL

RUN = ("-p", "seven", "-n", 1, "-t", 1)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ROUTEAHEAD_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "routeahead" / "config.toml"
    path.parent.mkdir()
    return path


@pytest.fixture
def settings(command: Command, tmp_path: Path):  # type: ignore[no-untyped-def]
    """The settings of a run with some flags."""

    def run(*flags: object) -> dict[str, Any]:
        report = tmp_path / "report.json"
        done = command("run", *flags, *RUN, "--report", report)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(report.read_text())["settings"])

    return run


def test_the_order(config: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = '[defaults]\nio_threads = 3\ncache_mb = "2M"\noverlap = false\ncontext = 64\n'
    config.write_text(f'{defaults}[models."/another.gguf"]\nio_threads = 4\n')
    found = settings()
    assert found["io_threads"] == 3 and found["cache_mb"] == 2 and not found["overlap"]
    assert found["n_ctx"] == 256  # llama.cpp rounds up
    config.write_text(f'{defaults}[models."{DEFAULT_MODEL}"]\nio_threads = 4\n')
    assert settings()["io_threads"] == 4  # `tune` without a model writes such a section
    assert settings(DEFAULT_MODEL)["io_threads"] == 4
    monkeypatch.chdir(DEFAULT_MODEL.parent)
    assert settings(DEFAULT_MODEL.name)["io_threads"] == 4
    monkeypatch.setenv("ROUTEAHEAD_IO_THREADS", "5")
    assert settings(DEFAULT_MODEL)["io_threads"] == 5
    found = settings(DEFAULT_MODEL, "--io-threads", 6, "--overlap", "--cache-mb", 3)
    assert found["io_threads"] == 6 and found["cache_mb"] == 3 and found["overlap"]


def test_a_resident_run_ignores_what_is_about_streaming(config: Path, settings: Any) -> None:
    config.write_text("[defaults]\nio_threads = 3\nn_expert_used = 2\n")
    assert settings("--resident")["io_threads"] == 2


def test_variables_that_are_no_settings(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the tests and the hub, and options that are about one run."""
    for name in ("ROUTEAHEAD_MODEL", "ROUTEAHEAD_PROMPT_FILE", "ROUTEAHEAD_CSV"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    settings()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[defaults]\nio_thread = 3",
            "[defaults] io_thread: unknown key; did you mean io_threads?",
        ),
        ("[defaults]\nio_threads = 0", "[defaults] io_threads = 0: io_threads is 0: give 1 to 64"),
        ("[defaults]\nio_threads = 'x'", "[defaults] io_threads = 'x': "),
        ("[defaults]\nio_threads = true", "io_threads = True: give no true or false"),
        ("[defaults]\nio_threads = [1]", "io_threads = [1]: give one value"),
        ("[defaults]\noverlap = 1", "overlap = 1: give true or false"),
        ("[defaults]\npolicy = 'a:B'", "policy = 'a:B': give a list"),
        ("[defaults]\ncache_mb = '4X'", "[defaults] cache_mb = '4X': "),
        ("[defaults]\nthreads = 1000", "[defaults] threads = 1000: "),
        ("[defaults]\nspin = -1", "[defaults] spin = -1: give a whole number"),
        ("[models.x]\nspin = 1", "[models.x] spin: unknown key: it is the machine's"),
        ("io_threads = 3", "unknown key 'io_threads': write [defaults]"),
        ("defaults = 3", "defaults is no table"),
        ("models = 3", "models is no table"),
        ("[models]\nx = 3", "models.x is no table"),
        ("[defaults]\nx = ", "no TOML: "),
    ],
)
def test_what_is_wrong_is_told_with_the_file(
    command: Command, config: Path, text: str, told: str
) -> None:
    config.write_text(text)
    done = command("run", *RUN)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"routeahead: {config}: ") and told in line
    assert command("--help").returncode == 0  # it is readable whatever the file says


def test_a_contradiction_names_the_file(command: Command, config: Path) -> None:
    config.write_text("[defaults]\nthrottle_latency_ms = 3\n")
    done = command("run", *RUN)
    assert done.returncode == 1
    assert f"(throttle_latency_ms: from {config})" in done.stderr


def test_help_names_no_variables(command: Command) -> None:
    assert "ROUTEAHEAD_IO" not in command("run", "--help").stdout
    assert "ROUTEAHEAD_API_KEY" in command("serve", "--help").stdout


class TestTune:
    def tuned(self, command: Command, *flags: object) -> Done:
        return command(
            "tune", DEFAULT_MODEL, "--passes", 1, "--tokens", 2, "--warmup", 0, *flags
        )  # fmt: skip

    def test_it_writes_what_it_took_and_keeps_the_rest(
        self, command: Command, config: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from routeahead.bench.tuning import Knob
        from routeahead.cli import tune

        tried = [
            Knob("io_threads", "--io-threads", 2, [3]),
            Knob("spin", "GOMP_SPINCOUNT=", 10000, []),
        ]
        monkeypatch.setattr(tune, "knobs", lambda layout: tried[1:])
        before = "# mine\n[defaults]\noverlap = false # slow\n[models.other]\nio_threads = 9\n"
        config.write_text(before)
        dry = self.tuned(command, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert config.read_text() == before and "nothing was written" in dry.stdout
        monkeypatch.setattr(tune, "knobs", lambda layout: tried)
        done = self.tuned(command)
        assert done.returncode == 0, done.stderr
        text, found = config.read_text(), tomlkit.parse(config.read_text())
        assert "# mine" in text and "overlap = false # slow" in text
        assert found["models"]["other"] == {"io_threads": 9}
        taken = found["models"][str(DEFAULT_MODEL)]["io_threads"]
        assert taken in (2, 3) and found["defaults"]["spin"] == 10000
        assert settings(DEFAULT_MODEL)["io_threads"] == taken
        assert "[3/3] spin 10000: " in done.stderr and "taken" in done.stdout

    def test_a_broken_file_is_told_before_anything_is_run(
        self, command: Command, config: Path
    ) -> None:
        config.write_text("[defaults]\nnothing = 1\n")
        done = self.tuned(command)
        assert done.returncode == 1 and "nothing: unknown key" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
