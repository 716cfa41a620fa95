"""Tables on disk, written batch by batch: CSV, or Parquet if the file's name ends in .parquet.

pyarrow reads and writes both. It is imported where a table is opened, because a run without traces
has no use for it.

CSV begins with lines `# key=value`, and what was added is in the file when `add` returns, so that a
run that is killed leaves all of it. A Parquet file can be read only after `close`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError

Columns = Mapping[str, str]
"""Name → Arrow type: "int64", "float64" or "string"."""

PARQUET = ".parquet"
_KEY = b"routeahead"  # of Parquet's metadata
_GROUP = 65536  # lines of a Parquet row group, which is compressed as a whole


class Table(Protocol):
    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        """Appends lines, given as columns of equal length in the order of the table's."""
        ...

    def close(self) -> None: ...


def open_table(
    path: Path, columns: Columns, head: Sequence[str], facts: Mapping[str, Any]
) -> Table:
    """Opens a table for writing.

    Args:
        head: lines for the top of a CSV, without "# ".
        facts: the same for a Parquet's metadata, as JSON under the key `routeahead`.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        if path.suffix == PARQUET:
            return _ParquetTable(path, columns, facts)
        return CsvTable(path, columns, head)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None


class CsvTable:
    """A CSV file. See the module for what is in it when."""

    def __init__(self, path: Path, columns: Columns, head: Sequence[str]) -> None:
        """Writes the lines on top.

        Raises:
            OSError: the file cannot be written.
        """
        import pyarrow as pa
        from pyarrow import csv

        self._schema = pa.schema(list(columns.items()))
        self._batch = pa.record_batch
        self._file = path.open("wb")
        lines = [*(f"# {line}" for line in head), ",".join(columns)]
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        options = csv.WriteOptions(include_header=False, quoting_style="none")
        self._writer = csv.CSVWriter(self._file, self._schema, write_options=options)

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        self._writer.write(self._batch(columns, schema=self._schema))
        self._file.flush()

    def comment(self, line: str) -> None:
        self._file.write(f"# {line}\n".encode())

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class _ParquetTable:
    def __init__(self, path: Path, columns: Columns, facts: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._schema = pa.schema(list(columns.items()), {_KEY: json.dumps(facts).encode()})
        self._arrow = pa
        self._file = path.open("wb")
        self._writer = parquet.ParquetWriter(self._file, self._schema)
        self._batches: list[Any] = []
        self._waiting = 0  # lines in `_batches`

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        batch = self._arrow.record_batch(columns, schema=self._schema)
        self._batches.append(batch)
        self._waiting += batch.num_rows
        if self._waiting >= _GROUP:
            self._write()

    def _write(self) -> None:
        self._writer.write_table(self._arrow.Table.from_batches(self._batches, self._schema))
        self._batches, self._waiting = [], 0

    def close(self) -> None:
        if self._waiting:
            self._write()
        self._writer.close()
        self._file.close()


@dataclass(frozen=True)
class Contents:
    """A table that was read.

    Attributes:
        columns: name → values, of the columns that were asked for.
        head: the lines on top of a CSV, without "# ".
        facts: the JSON of a Parquet's metadata; None for a CSV.
    """

    columns: dict[str, npt.NDArray[Any]]
    head: Sequence[str] = ()
    facts: Any = None


def read_table(path: Path, columns: Columns) -> Contents:
    """Reads `columns` of a table; others may be in it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such table; says why.
    """
    return (_read_parquet if path.suffix == PARQUET else _read_csv)(path, columns)


def _read_csv(path: Path, columns: Columns) -> Contents:
    from pyarrow import csv

    with path.open("rb") as file:
        head = []
        while (line := file.readline().decode().rstrip("\r\n")).startswith("#"):
            head.append(line[1:].strip())
        names = line.split(",")
        _require(columns, names)
        if not file.peek(1):
            return Contents(
                {name: np.empty(0, _numpy_type(columns[name])) for name in columns}, head
            )
        table = csv.read_csv(
            file,
            csv.ReadOptions(column_names=names, use_threads=False),
            convert_options=csv.ConvertOptions(
                column_types=columns, include_columns=list(columns), null_values=["", "nan"]
            ),
        )
    return Contents(_values(table, columns), head)


def _read_parquet(path: Path, columns: Columns) -> Contents:
    import pyarrow as pa
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    _require(columns, schema.names)
    table = parquet.read_table(path, columns=list(columns)).select(list(columns))
    values = _values(table.cast(pa.schema(list(columns.items()))), columns)
    try:
        return Contents(values, facts=json.loads((schema.metadata or {}).get(_KEY, b"{}")))
    except ValueError:
        raise ValueError(f"its metadata has no JSON under the key {_KEY.decode()}") from None


def _require(columns: Columns, present: Sequence[str]) -> None:
    missing = [name for name in columns if name not in present]
    if missing:
        raise ValueError(f"it lacks the columns {', '.join(missing)}")


def _values(table: Any, columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """A number that is absent is NaN; only floats may be absent."""
    for name, kind in columns.items():
        if kind != "float64" and table.column(name).null_count:
            raise ValueError(f"the column {name} has no value in some lines")
    return {
        name: table.column(name).to_numpy().astype(_numpy_type(kind), copy=False)
        for name, kind in columns.items()
    }


def _numpy_type(kind: str) -> type[np.generic]:
    return {"int64": np.int64, "float64": np.float64, "string": np.str_}[kind]
