"""Files that a run writes: apart from what it reads, and complete or absent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from routeahead.errors import SettingsError


def check_apart(inputs: Iterable[tuple[str, Path]], outputs: Iterable[Path]) -> None:
    """Checks that no output is an input or another output, by whatever name or link.

    Call it before anything is opened. What is no regular file, such as /dev/stdout, may be given
    twice.

    Args:
        inputs: what each is, as in "a file of the model", and its path.

    Raises:
        SettingsError: one is.
    """
    taken = {_identity(path): what for what, path in inputs}
    for path in outputs:
        if path.exists() and not path.is_file():
            continue
        place = _identity(path)
        if place in taken:
            raise SettingsError(f"{path}: is {taken[place]}: write to another file")
        taken[place] = "written already"


def _identity(path: Path) -> tuple[int, int] | Path:
    """Device and inode; of a file that is not there yet, where it will be."""
    try:
        found = path.stat()
    except OSError:
        return path.resolve()
    return found.st_dev, found.st_ino


def not_written(path: Path, error: OSError) -> SettingsError:
    """What to raise for an error that prevented a file."""
    if not path.parent.exists():
        return SettingsError(f"{path}: cannot be written: there is no folder {path.parent}")
    return SettingsError(f"{path}: cannot be written: {error.strerror or error}")


def check_writable(path: Path) -> None:
    """Checks that `path` can be written, so that a long run does not end without its report.

    Raises:
        SettingsError: it cannot.
    """
    there = path.exists()
    try:
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise not_written(path, error) from None


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A UTF-8 text file that becomes `path` when it is complete; on any error `path` is untouched.

    It is written under a name that nobody can foresee, and so place a link there, in the same
    folder. If `path` is a link, the file that it points to is replaced; what is no regular file
    (/dev/stdout) is written to directly.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8") as file:
                yield file
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o7777)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise not_written(path, error) from None
