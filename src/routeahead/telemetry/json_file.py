"""JSON files that are complete or absent, never half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeahead.telemetry.output_files import replacing


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path`, which is replaced when all of it is written (`replacing`).

    Objects that JSON has no type for, such as paths, are written as their text.

    Raises:
        SettingsError: the file cannot be written.
    """
    text = json.dumps(content, indent=1, default=str) + "\n"
    with replacing(path) as file:
        file.write(text)
