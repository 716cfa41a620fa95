"""The folder of an evaluation: finished pieces and the baseline's logits, so that it can resume.

    plan.json                  what is evaluated: another plan is refused
    baseline/NAME.json         a finished piece of the baseline
    baseline/NAME.f32          its logits, float32 [tokens, vocabulary], until no setting needs them
    settings/SETTING/flags.json, NAME.json

Files are written under a temporary name and renamed, so a file that exists is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from routeahead.errors import SettingsError
from routeahead.evaluation.quality import Logits
from routeahead.telemetry.json_file import write_json

BASELINE = "baseline"


class WorkFolder:
    """The folder's pieces, by the name of their setting (`BASELINE` for the baseline's)."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        """Opens `folder`, or creates it; `plan` must be the one that it was created with.

        Raises:
            SettingsError: the folder cannot be used, or was created with another plan.
        """
        self._folder = folder
        self._make(folder)
        self._make(self._of(BASELINE))
        changed = self._differences(folder / "plan.json", plan)
        if changed:
            raise SettingsError(
                f"{folder}: begun with another {', '.join(changed)}: "
                "give the same arguments, or another --work"
            )

    def open_setting(self, name: str, kwargs: dict[str, Any]) -> None:
        """Opens a setting's folder, or creates it; its flags must be those it was created with.

        Raises:
            SettingsError: the folder holds pieces of this name with other flags.
        """
        folder, flags = self._of(name), self._of(name) / "flags.json"
        self._make(folder)
        if list(folder.glob("*.json")) == [flags]:
            flags.unlink()  # nothing was finished with them: they may have been wrong
        changed = self._differences(flags, kwargs)
        if changed:
            raise SettingsError(
                f"setting {name}: begun in {self._folder} with other flags ({', '.join(changed)}): "
                "give it another name, or another --work"
            )

    def has(self, setting: str, piece: str) -> bool:
        return (self._of(setting) / f"{piece}.json").exists()

    def save(self, setting: str, piece: str, result: dict[str, Any]) -> None:
        write_json(self._of(setting) / f"{piece}.json", result)

    def read(self, setting: str, piece: str) -> dict[str, Any]:
        """The result of a finished piece.

        Raises:
            SettingsError: the piece is missing or damaged.
        """
        result = _read_json(self._of(setting) / f"{piece}.json")
        if not isinstance(result, dict):
            raise SettingsError(f"{self._of(setting)}: {piece}.json is damaged: delete it")
        return result

    def has_logits(self, piece: str) -> bool:
        return self._logits(piece).exists()

    @contextlib.contextmanager
    def new_logits(self, piece: str) -> Iterator[Callable[[Logits], None]]:
        """Gives a function that takes the logits of each token in turn, float32 [vocabulary].

        They are kept if the block ends without an error.

        Raises:
            SettingsError: they cannot be written.
        """
        path = self._logits(piece)
        temporary = path.with_name(path.name + ".tmp")
        # Written, not mapped: a full disk is then an error and not a SIGBUS.
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:  # not through a link
                yield lambda logits: logits.tofile(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(f"{path}: cannot write the logits: {reason}") from None

    def logits(self, piece: str, vocabulary: int) -> Logits:
        """The baseline's logits of a piece, float32 [tokens, vocabulary], read when used."""
        return np.memmap(self._logits(piece), np.float32, mode="r").reshape(-1, vocabulary)

    def drop_logits(self, piece: str) -> None:
        self._logits(piece).unlink(missing_ok=True)

    def check_room(self, needed: int) -> None:
        """Checks that the logits fit on the disk.

        Raises:
            SettingsError: it has less than `needed` bytes left.
        """
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise SettingsError(
                f"{self._folder}: the baseline's logits take {needed >> 20} MiB and {free >> 20} "
                "are free: give fewer --max-tokens, or a --work on another disk"
            )

    def _of(self, setting: str) -> Path:
        return (
            self._folder / BASELINE if setting == BASELINE else self._folder / "settings" / setting
        )

    def _logits(self, piece: str) -> Path:
        return self._of(BASELINE) / f"{piece}.f32"

    @staticmethod
    def _make(folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{folder}: cannot make this folder: {error.strerror}") from None

    @staticmethod
    def _differences(path: Path, content: dict[str, Any]) -> list[str]:
        """Keys in which the JSON file at `path` differs from `content`; written if absent."""
        now = json.loads(json.dumps(content, default=str))
        if not path.exists():
            write_json(path, now)
            return []
        before = _read_json(path)
        if not isinstance(before, dict):
            raise SettingsError(f"{path}: not written by this command: give another --work")
        keys = dict.fromkeys([*before, *now])
        return [key for key in keys if before.get(key) != now.get(key)]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot read it: {error.strerror}") from None
    except ValueError:
        raise SettingsError(f"{path}: damaged: delete it, and the rest continues") from None
