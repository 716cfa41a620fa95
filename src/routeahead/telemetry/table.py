"""Tables written row by row: CSV with `# key=value` lines on top, or Parquet by the file's name."""

from __future__ import annotations

import contextlib
import csv
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from routeahead.errors import SettingsError, visible

_ROW_GROUP = 65536


class Table(Protocol):
    """Rows go to a file. Where that fails (a disk that is full), a `SettingsError` names the file,
    once: what comes after it is dropped."""

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
    if path.suffix == ".parquet":
        return ParquetTable(path, columns, facts)
    return CsvTable(path, list(columns), head)


def no_pyarrow(path: Path) -> str:
    """What to say where a Parquet file is asked for and pyarrow is not installed."""
    return f"{path}: Parquet needs pyarrow: install routeahead[parquet], or use a .csv"


def whole_lines(lines: Iterable[str], path: Path) -> Iterator[str]:
    """The lines of a table up to the first that has no end: the run that wrote it was cut short."""
    for line in lines:
        if not line.endswith("\n"):
            warnings.warn(f"{path}: ends inside a row; what comes before it is used", stacklevel=2)
            return
        yield line


class _Output:
    """A file that is written to until that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.broken = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """
        Raises:
            SettingsError: the block could not write.
        """
        try:
            yield
        except OSError as error:
            self.broken = True
            reason = error.strerror or error
            raise SettingsError(f"{self._path}: cannot be written: {reason}") from None


class CsvTable:
    """
    Raises:
        SettingsError: the file cannot be written.
    """

    def __init__(self, path: Path, columns: Sequence[str], head: Sequence[str]) -> None:
        self._output = _Output(path)
        with self._output.writing():
            self._file = path.open("w", encoding="utf-8", newline="")
            self._file.writelines(f"# {visible(line)}\n" for line in head)
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(columns)

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        if not self._output.broken:
            with self._output.writing():
                self._writer.writerows(rows)

    def comment(self, line: str) -> None:
        if not self._output.broken:
            with self._output.writing():
                self._file.write(f"# {line}\n")

    def close(self) -> None:
        if self._output.broken:
            with contextlib.suppress(OSError):  # it would try to write what is left
                self._file.close()
        else:
            with self._output.writing():
                self._file.close()


class ParquetTable:
    """
    Raises:
        SettingsError: the file cannot be written, or pyarrow is not installed.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError:
            raise SettingsError(no_pyarrow(path)) from None
        fields = [pa.field(name, kind) for name, kind in columns.items()]
        self._schema = pa.schema(fields, {b"routeahead": json.dumps(facts).encode()})
        self._output = _Output(path)
        with self._output.writing():
            self._writer = parquet.ParquetWriter(path, self._schema)
        self._table = pa.table
        self._rows: list[Sequence[Any]] = []

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        self._rows += rows
        if len(self._rows) >= _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows and not self._output.broken:
            columns = [list(column) for column in zip(*rows, strict=True)]
            with self._output.writing():
                self._writer.write_table(self._table(columns, schema=self._schema))

    def close(self) -> None:
        self._flush()
        if self._output.broken:
            with contextlib.suppress(OSError):
                self._writer.close()
        else:
            with self._output.writing():
                self._writer.close()
