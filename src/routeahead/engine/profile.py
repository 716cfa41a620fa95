"""The profile of a model: which experts its last runs used, in a small file.

It says what idle lanes read first (`experts.filling`). It lies in `routeahead/profiles` of the
cache folder (`$XDG_CACHE_HOME`, else `~/.cache`), under a name made of the model's sizes, metadata
and tensors: a file that was moved keeps its profile, another quantisation has its own. One that is
missing, damaged or cannot be written is none: it decides about speed alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from routeahead.errors import SettingsError
from routeahead.experts.layout import ModelLayout
from routeahead.experts.uses import Uses
from routeahead.telemetry.json_file import write_json

_FORMAT = "routeahead uses v1"
_DAMAGED = ArithmeticError, LookupError, TypeError, ValueError


def profile_path(layout: ModelLayout) -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "routeahead" / "profiles"
    # Of lists, the layout keeps only what differs from one process to the next.
    plain = {k: v for k, v in layout.metadata.items() if isinstance(v, (str, int, float))}
    known = [shard.size for shard in layout.shards], sorted(plain.items())
    tensors = [(e.name, e.shard, e.offset, e.quant) for e in layout.experts]
    return folder / f"{hashlib.sha256(repr((known, tensors)).encode()).hexdigest()[:16]}.json"


def read_uses(layout: ModelLayout) -> Uses:
    """No uses yet in this run, and what earlier ones left."""
    experts = {tensor.layer: tensor.n_expert for tensor in layout.experts}
    with contextlib.suppress(OSError, RuntimeError, *_DAMAGED):
        path = profile_path(layout)
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if content and content["format"] == _FORMAT:
            return Uses(experts, _checked(content["layers"], experts))
    return Uses(experts)


def _checked(
    layers: Mapping[str, list[float]], experts: Mapping[int, int]
) -> dict[int, list[float]]:
    """
    Raises:
        ArithmeticError, LookupError, TypeError, ValueError: they are not counts of such layers.
    """
    counts = {layer: [float(count) for count in layers[str(layer)]] for layer in experts}
    if any(len(counts[layer]) != count for layer, count in experts.items()):
        raise ValueError("of other layers")
    if not all(0 <= count < math.inf for of in counts.values() for count in of):
        raise ValueError("no counts")
    return counts


def write_uses(layout: ModelLayout, uses: Uses) -> None:
    """Leaves this run's uses for the next one, if there were any."""
    if not uses:
        return
    layers = {layer: [round(c, 2) for c in counts] for layer, counts in uses.merged().items()}
    with contextlib.suppress(OSError, SettingsError, RuntimeError):
        path = profile_path(layout)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(path, {"format": _FORMAT, "layers": layers})
