"""An evaluation continues where it was stopped, and only if it is the same one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.evaluations import CONTEXT, PLAIN, TEXT, TOKENS, fewer
from support.library import Library
from support.readers import Failing, disk_error

from routeahead.engine.streamed_model import Hooks
from routeahead.errors import ReadError, SettingsError
from routeahead.evaluation.evaluate import Evaluation, Request, Setting
from routeahead.evaluation.summary import Summary
from routeahead.evaluation.work import WorkFolder

pytest_plugins = ["support.eval_fixtures"]


class Stop(Exception):
    pass


def without_times(summaries: list[Summary]) -> list[dict[str, Any]]:
    """What must not depend on interruptions: times do, and bytes where a cache starts cold."""
    found = [summary.as_dict() for summary in summaries]
    for one in found:
        one["cost"] = {"tokens": one["cost"]["tokens"]}
    return found


def test_resumes_after_any_interruption(
    request_on: Callable[..., Request], prompts: Path, tmp_path: Path
) -> None:
    request = request_on("mixtral", prompts=prompts, generate=8)
    settings = [PLAIN, fewer(1)]
    whole = Evaluation(request, settings, tmp_path / "whole").run()
    work = tmp_path / "work"
    finished: dict[Path, int] = {}
    stops = 0
    for after in (3, 70, 150, 150, 200, 250, 100_000):
        left = after

        def progress(*_: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Stop

        evaluation = Evaluation(request, settings, work)
        try:
            summaries = evaluation.run(progress)
        except Stop:
            stops += 1
        pieces = [*work.glob("baseline/*.json"), *work.glob("settings/*/*-*.json")]
        times = {path: path.stat().st_mtime_ns for path in pieces}
        assert finished.items() <= times.items()  # nothing that was finished was done again
        finished = times
    assert stops >= 4
    assert without_times(summaries) == without_times(whole)


def test_survives_a_kill(request_on: Callable[..., Request], tmp_path: Path) -> None:
    request = request_on()
    work = tmp_path / "work"
    script = f"""
import os, signal
from pathlib import Path
from routeahead.evaluation.evaluate import Evaluation, Request, Setting

def progress(name, done, total):
    if name == "plain" and done == {CONTEXT + 10}:
        os.kill(os.getpid(), signal.SIGKILL)

request = Request(Path({str(request.model)!r}), text=Path({str(request.text)!r}),
                  context={CONTEXT}, threads=1)
Evaluation(request, [Setting("plain", {{"cache_mb": 0}})], Path({str(work)!r})).run(progress)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((work / "settings" / "plain").glob("text-*.json"))) == 1
    _, plain = Evaluation(request, [PLAIN], work).run()
    assert plain.text and plain.text["tokens"] == TOKENS and plain.text["kl_p99"] == 0


def test_a_finished_evaluation_is_read_and_its_logits_are_gone(
    request_on: Callable[..., Request], tmp_path: Path
) -> None:
    evaluation = Evaluation(request_on(), [PLAIN], tmp_path)
    assert evaluation.logit_bytes == TOKENS * 259 * 4
    first = evaluation.run()
    assert not list(tmp_path.rglob("*.f32")) and not list(tmp_path.rglob("*.tmp"))
    again = Evaluation(request_on(), [PLAIN], tmp_path)
    assert again.logit_bytes == 0
    assert again.run() == first


def test_a_setting_can_be_added(request_on: Callable[..., Request], tmp_path: Path) -> None:
    (_, before) = Evaluation(request_on(), [PLAIN], tmp_path).run()
    added = Setting("serial", {"cache_mb": 0, "overlap": False})
    _, plain, serial = Evaluation(request_on(), [PLAIN, added], tmp_path).run()
    assert plain == before
    assert serial.text == plain.text


def test_other_arguments_are_refused(
    library: Library, request_on: Callable[..., Request], text: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    model = tmp_path / "model.gguf"
    model.write_bytes(library.path("qwen3moe").read_bytes())
    request = replace(request_on(), model=model, max_tokens=20)
    Evaluation(request, [PLAIN], work).run()

    other = Setting("plain", {"cache_mb": 0, "overlap": False})
    with pytest.raises(SettingsError, match=r"setting plain: begun .* other flags \(overlap\)"):
        Evaluation(request, [other], work)
    with pytest.raises(SettingsError, match="begun with another context: give"):
        Evaluation(replace(request, context=32), [PLAIN], work)
    os.utime(model, ns=(0, 0))
    with pytest.raises(SettingsError, match="begun with another model: give"):
        Evaluation(request, [PLAIN], work)
    text.write_text(TEXT + "!")
    with pytest.raises(SettingsError, match="begun with another model, text: give"):
        Evaluation(request, [PLAIN], work)


def test_flags_that_never_ran_may_change(
    request_on: Callable[..., Request], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"^plain: dense is"):
        Evaluation(request_on(), [replace(PLAIN, kwargs={"dense": "no"})], tmp_path).run()
    _, plain = Evaluation(request_on(), [PLAIN], tmp_path).run()
    assert plain.text and plain.text["kl_p99"] == 0


def test_a_changed_file_of_a_setting_is_refused(
    request_on: Callable[..., Request], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("one")
    replayed = Setting("replayed", {"replay_routing": trace})
    Evaluation(request_on(), [replayed], tmp_path / "work")
    (tmp_path / "work/settings/replayed/text-00000.json").write_text("{}")
    trace.write_text("two")
    with pytest.raises(SettingsError, match=r"other flags \(replay_routing\)"):
        Evaluation(request_on(), [replayed], tmp_path / "work")
    trace.unlink()
    with pytest.raises(SettingsError, match="cannot read it: No such file"):
        Evaluation(request_on(), [replayed], tmp_path / "work")


def test_damaged_pieces_are_named(request_on: Callable[..., Request], tmp_path: Path) -> None:
    Evaluation(request_on(), [PLAIN], tmp_path).run()
    (tmp_path / "settings" / "plain" / "text-00000.json").write_text("{")
    with pytest.raises(SettingsError, match=r"text-00000\.json: damaged: delete it"):
        Evaluation(request_on(), [PLAIN], tmp_path).run()


def test_a_failed_read_names_its_setting_and_leaves_nothing(
    request_on: Callable[..., Request], tmp_path: Path
) -> None:
    def failing(inner: Any) -> Failing:
        reader = Failing(inner, lambda count: count == 5, disk_error)
        reader.armed = True
        return reader

    # The dense weights are mapped, so that the fifth read is an expert's.
    hooks = Hooks(wrap_reader=failing)
    broken = Setting("broken", {"cache_mb": 0, "dense": "mmap", "_hooks": hooks})
    with pytest.raises(ReadError, match=r"^broken: .*Input/output error"):
        Evaluation(request_on(), [broken], tmp_path).run()
    assert not list((tmp_path / "settings" / "broken").glob("text-*"))
    assert len(list((tmp_path / "baseline").glob("text-*.f32"))) == -(-TOKENS // CONTEXT)


def test_a_full_disk_is_noticed_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give fewer --max-tokens"):
        WorkFolder(tmp_path, {}).check_room(1 << 60)
