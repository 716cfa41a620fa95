"""Tables written row by row: CSV with `# key=value` lines on top, or Parquet by the file's name."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from routeahead.errors import SettingsError

_ROW_GROUP = 65536


class Table(Protocol):
    def add(self, rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self) -> None: ...


def open_table(
    path: Path, columns: Mapping[str, str], head: Sequence[str], facts: Mapping[str, Any]
) -> Table:
    """Opens a table for writing.

    Args:
        columns: name → Arrow type ("int64", "float64", "string").
        head: lines for the top of a CSV, without "# ".
        facts: the same for a Parquet's metadata, as JSON under the key `routeahead`.

    Raises:
        SettingsError: the file cannot be written, or Parquet is asked for without pyarrow.
    """
    try:
        if path.suffix == ".parquet":
            return ParquetTable(path, columns, facts)
        return CsvTable(path, list(columns), head)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
    except ImportError:
        raise SettingsError(
            f"{path}: Parquet needs pyarrow: install routeahead[parquet], or name the file .csv"
        ) from None


class CsvTable:
    def __init__(self, path: Path, columns: Sequence[str], head: Sequence[str]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._file.writelines(f"# {line}\n" for line in head)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(columns)

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        self._writer.writerows(rows)

    def comment(self, line: str) -> None:
        self._file.write(f"# {line}\n")

    def close(self) -> None:
        self._file.close()


class ParquetTable:
    def __init__(self, path: Path, columns: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        fields = [pa.field(name, kind) for name, kind in columns.items()]
        self._schema = pa.schema(fields, {b"routeahead": json.dumps(facts).encode()})
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._table = pa.table
        self._rows: list[Sequence[Any]] = []

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        self._rows += rows
        if len(self._rows) >= _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = [list(column) for column in zip(*self._rows, strict=True)]
            self._writer.write_table(self._table(columns, schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()
