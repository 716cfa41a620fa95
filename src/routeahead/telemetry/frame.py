"""Traces as pandas DataFrames, for notebooks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from routeahead.errors import SettingsError
from routeahead.telemetry.route_trace import TraceError
from routeahead.telemetry.table import read_arrow

if TYPE_CHECKING:
    import pandas as pd


def read_trace(path: str | os.PathLike[str]) -> pd.DataFrame:
    """A trace that `--csv`, `--io-trace` or `--route-trace` wrote, CSV or Parquet, of any version.

    The columns are the file's; `frame.attrs["facts"]` has what is known of the whole run (settings
    and versions, bytes of an expert by layer) as a dictionary, or as a list of lines if the trace
    is of a version that began with comments.

    Raises:
        TraceError: the file cannot be read, or is no trace.
        SettingsError: pandas is missing.
    """
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise SettingsError("read_trace needs pandas: pip install 'routeahead[pandas]'") from None
    try:
        table, facts = read_arrow(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise TraceError(f"{path}: cannot be read as a trace: {reason}") from None
    frame: pd.DataFrame = table.to_pandas()
    frame.attrs["facts"] = facts
    return frame
