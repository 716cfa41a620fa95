"""JSON files that are complete or absent, never half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeahead.errors import SettingsError


def write_json(path: Path, content: Any) -> None:
    """Writes a temporary file beside `path` and renames it to `path`.

    Objects that JSON has no type for, such as paths, are written as their text. If `path` is a
    link, the file that it points to is replaced; what is no regular file (/dev/stdout) is written
    to directly.

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
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot write it: {error.strerror}") from None
