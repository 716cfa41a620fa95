"""Tables on disk, written batch by batch: CSV, or Parquet if the file's name ends in .parquet.

pyarrow reads and writes both. It is imported where a table is opened, because a run without traces
has no use for it.

What is known of the whole table, its facts, is JSON: in a Parquet's metadata under the key
`routeahead`; in a CSV in the last column, `facts`, of the first line, so that every reader of CSV
takes the file as it is. (Older CSVs begin with lines `# key=value`; they can be read.) Facts that
are known only at the end stand beside a CSV's last line, and in a Parquet under a key of their own.

What was added to a CSV is in the file when `add` returns, so that a run that is killed leaves all
of it. A Parquet file can be read only after `close`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError
from routeahead.telemetry.output_files import not_written

Columns = Mapping[str, str]
"""Name → Arrow type: "int64", "float64" or "string"."""

PARQUET = ".parquet"
FACTS = "facts"  # a CSV's last column
_KEY = b"routeahead"  # of Parquet's metadata
_END_KEY = b"routeahead.end"  # of the facts that are known at the end
_GROUP = 65536  # lines of a Parquet row group, which is compressed as a whole


class Table(Protocol):
    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        """Appends lines, given as columns of equal length in the order of the table's."""
        ...

    def conclude(self, columns: Sequence[Sequence[Any]], facts: Mapping[str, Any]) -> None:
        """Appends the last lines, one or more, and further facts. Only `close` comes after it."""
        ...

    def close(self) -> None: ...


def open_table(path: Path, columns: Columns, facts: Mapping[str, Any]) -> Table:
    """Opens a table for writing. `facts` has to be JSON.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        made: Table = (_ParquetTable if path.suffix == PARQUET else _CsvTable)(path, columns, facts)
        return _Named(path, made)
    except OSError as error:
        raise not_written(path, error) from None


class _Named:
    """A table whose errors name the file: a disk may be full after hours. That is said once; what
    comes after it is dropped."""

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table
        self._broken = False

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        if not self._broken:
            with self._naming():
                self._table.add(columns)

    def conclude(self, columns: Sequence[Sequence[Any]], facts: Mapping[str, Any]) -> None:
        if not self._broken:
            with self._naming():
                self._table.conclude(columns, facts)

    def close(self) -> None:
        if self._broken:
            with contextlib.suppress(OSError):  # it would try to write what is left
                self._table.close()
        else:
            with self._naming():
                self._table.close()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._broken = True
            reason = error.strerror or error
            raise SettingsError(f"{self._path}: cannot be written: {reason}") from None


class _CsvTable:
    """A CSV file. See the module for what is in it when."""

    def __init__(self, path: Path, columns: Columns, facts: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        self._arrow, self._facts = pa, dict(facts)  # what has not been written
        self._own = pa.schema(list(columns.items()))
        self._schema = self._own.append(pa.field(FACTS, pa.string()))
        self._file = path.open("wb")
        self._file.write(f"{','.join(self._schema.names)}\n".encode())
        options = arrow_csv.WriteOptions(include_header=False, quoting_style="none")
        self._writer = arrow_csv.CSVWriter(self._file, self._schema, write_options=options)

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        batch = self._arrow.record_batch(columns, schema=self._own)
        if self._facts and batch.num_rows:
            self._write_first(batch)
            batch = batch.slice(1)
        none = self._arrow.nulls(batch.num_rows, self._arrow.string())
        columns = [*batch.columns, none]
        self._writer.write(self._arrow.record_batch(columns, schema=self._schema))
        self._file.flush()

    def _write_first(self, batch: Any) -> None:
        """The first line of a batch, with the facts that have not been written."""
        values = batch.slice(0, 1).to_pylist()[0].values()
        self._file.write(_line([*values, json.dumps(self._facts)]))
        self._facts = {}

    def conclude(self, columns: Sequence[Sequence[Any]], facts: Mapping[str, Any]) -> None:
        self.add([column[:-1] for column in columns])
        self._facts |= facts
        last = [column[-1:] for column in columns]
        self._write_first(self._arrow.record_batch(last, schema=self._own))
        self._file.flush()

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._file.close()


def _line(values: Sequence[Any]) -> bytes:
    """A line of a CSV in which only what needs quotes has them."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


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

    def conclude(self, columns: Sequence[Sequence[Any]], facts: Mapping[str, Any]) -> None:
        self.add(columns)
        self._writer.add_key_value_metadata({_END_KEY: json.dumps(facts).encode()})

    def _write(self) -> None:
        self._writer.write_table(self._arrow.Table.from_batches(self._batches, self._schema))
        self._batches, self._waiting = [], 0

    def close(self) -> None:
        try:
            if self._waiting:
                self._write()
            self._writer.close()
        finally:
            self._file.close()


@dataclass(frozen=True)
class Contents:
    """A table that was read.

    Attributes:
        columns: name → values, of the columns that were asked for.
        head: the lines on top of an older CSV, without "# ".
        facts: what is known of the whole table; None for an older CSV.
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


def read_arrow(path: Path) -> tuple[Any, Any]:
    """All columns of a table as a pyarrow.Table, and its facts; of an older CSV, its head's lines.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such table.
    """
    from pyarrow import csv as arrow_csv
    from pyarrow import py_buffer

    if path.suffix == PARQUET:
        from pyarrow import parquet

        return parquet.read_table(path), _parquet_facts(path)
    # Older ones have comments, at the end too.
    lines = _whole_lines(path).splitlines(keepends=True)
    head = [line[1:].decode().strip() for line in lines if line.startswith(b"#")]
    content = py_buffer(b"".join(line for line in lines if not line.startswith(b"#")))
    options = arrow_csv.ConvertOptions(null_values=["", "nan"])
    table = arrow_csv.read_csv(content, convert_options=options)
    if FACTS not in table.column_names:
        return table, head
    facts = _csv_facts(table)
    return table.drop_columns([FACTS]), facts


def _read_csv(path: Path, columns: Columns) -> Contents:
    from pyarrow import csv as arrow_csv

    with io.BytesIO(_whole_lines(path)) as file:
        head = []
        while (line := file.readline().decode().rstrip("\r\n")).startswith("#"):
            head.append(line[1:].strip())
        names = line.split(",")
        _require(columns, names)
        if not file.getbuffer()[file.tell() :].nbytes:
            return Contents(
                {name: np.empty(0, _numpy_type(columns[name])) for name in columns}, head
            )
        wanted = {**columns, FACTS: "string"} if FACTS in names else columns
        table = arrow_csv.read_csv(
            file,
            arrow_csv.ReadOptions(column_names=names, use_threads=False),
            convert_options=arrow_csv.ConvertOptions(
                column_types=wanted,
                include_columns=list(wanted),
                null_values=["", "nan"],
                strings_can_be_null=True,
            ),
        )
    return Contents(_values(table, columns), head, _csv_facts(table) if FACTS in names else None)


def _whole_lines(path: Path) -> bytes:
    """A file up to its last line that has an end: the run that wrote it may have been cut short."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if not end or end == len(content):
        return content
    warnings.warn(f"{path}: ends inside a line; what comes before it is used", stacklevel=2)
    return content[:end]


def _csv_facts(table: Any) -> Any:
    column = table.column(FACTS)
    try:
        facts = json.loads(column[0].as_py() or "{}") if table.num_rows else {}
        end = column[-1].as_py() if table.num_rows > 1 else None
        return {**facts, **json.loads(end)} if end else facts
    except (ValueError, TypeError):
        raise ValueError(f"its first and last line have no JSON in the column {FACTS}") from None


def _parquet_facts(path: Path) -> Any:
    from pyarrow import parquet

    metadata = parquet.read_metadata(path).metadata or {}
    try:
        facts, end = json.loads(metadata.get(_KEY, b"{}")), metadata.get(_END_KEY)
        return {**facts, **json.loads(end)} if end else facts
    except ValueError:
        raise ValueError(f"its metadata has no JSON under the key {_KEY.decode()}") from None


def _read_parquet(path: Path, columns: Columns) -> Contents:
    import pyarrow as pa
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    _require(columns, schema.names)
    table = parquet.read_table(path, columns=list(columns)).select(list(columns))
    values = _values(table.cast(pa.schema(list(columns.items()))), columns)
    return Contents(values, facts=_parquet_facts(path))


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
