"""JSON files that are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeahead.errors import SettingsError


def write_json(path: Path, content: Any) -> None:
    """Writes beside `path` and renames. What JSON has no type for (paths) becomes its text.

    A link keeps pointing where it does, and what is no file (/dev/stdout) is written to.

    Raises:
        SettingsError: the file cannot be written.
    """
    text = json.dumps(content, indent=1, default=str) + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        temporary = path.with_name(path.name + ".tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # nothing half-written stays
            raise
    except OSError as error:
        raise SettingsError(f"{path}: cannot write it: {error.strerror}") from None
