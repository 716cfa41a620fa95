"""Runs a verb of `routeahead` in a process of its own and returns the JSON that it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def cli_json(verb: str, *arguments: object) -> Any:
    """What `routeahead VERB ARGUMENTS` writes with --report (`run`) or --json (the others).

    Raises:
        SystemExit: it failed; says how.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [verb, *arguments, "--report" if verb == "run" else "--json", out]
        command = [sys.executable, "-m", "routeahead.cli.main", *map(str, words)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"failed: {' '.join(command)}\n{ended.stderr}")
        return json.loads(out.read_text(encoding="utf-8"))
