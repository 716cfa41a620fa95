"""The model that ships with the package, for a first try and for the demo."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = Path(__file__).with_name("default.gguf")
