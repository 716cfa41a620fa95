"""Files that a run writes: apart from its inputs, complete or absent, never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from routeahead.errors import SettingsError
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.output_files import check_apart, replacing


@pytest.mark.parametrize("link", ["same", "dotted", "symbolic", "hard"])
def test_an_output_is_recognised_by_whatever_name(tmp_path: Path, link: str) -> None:
    source, other = tmp_path / "in", tmp_path / "out"
    source.write_text("x")
    if link == "same":
        other = source
    elif link == "dotted":
        other = tmp_path / ".." / tmp_path.name / "in"
    elif link == "symbolic":
        other.symlink_to(source)
    else:
        os.link(source, other)
    with pytest.raises(SettingsError, match="is the prompt: write to another file"):
        check_apart([("the prompt", source)], [other])


def test_two_outputs_are_two_files_even_before_they_exist(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for second in (tmp_path / "out", tmp_path / "." / "out", tmp_path / "link"):
        with pytest.raises(SettingsError, match="written already"):
            check_apart([], [tmp_path / "out", second])
    check_apart([("the prompt", tmp_path / "in")], [tmp_path / "out", tmp_path / "other"])
    check_apart([], [Path("/dev/null"), Path("/dev/null")])


def test_nothing_is_written_through_a_link_that_others_placed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "report.json.tmp").symlink_to(victim)
    write_json(tmp_path / "report.json", {"a": 1})
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.json",
        "report.json.tmp",
        "victim",
    ]


def test_an_error_leaves_the_file_that_was_there_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_a_new_one_gets_the_users(tmp_path: Path) -> None:
    path, plain = tmp_path / "report.json", tmp_path / "plain"
    plain.touch()
    write_json(path, {})
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write_json(path, {})
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be written: there is no folder .*/none$"):
        write_json(tmp_path / "none" / "x.json", {})
    with pytest.raises(SettingsError, match="/dev/full: cannot be written: No space left"):
        write_json(Path("/dev/full"), {})
