"""Safetensors files that are complete or absent, and whose numbers are those that were written."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError
from routeahead.telemetry.output_files import not_written

Tensors = dict[str, npt.NDArray[Any]]
_FACTS = "routeahead"  # key of the file's metadata


def write_tensors(path: Path, tensors: Tensors, facts: Mapping[str, Any]) -> None:
    """Writes contiguous tensors and JSON facts to `path`, which is replaced when all is written.

    Raises:
        SettingsError: the file cannot be written, or safetensors is not installed.
    """
    library = _library()
    content = json.dumps({**facts, "sha256": _digest(tensors)})
    target = path.resolve()
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:  # nobody has placed a link there
            mode = os.fstat(file.fileno()).st_mode & 0o7777
        library.numpy.save_file(tensors, temporary, {_FACTS: content})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # the library makes a file of its own, for the owner alone
        temporary.replace(target)
    except OSError as error:
        raise not_written(path, error) from None
    except Exception as error:  # the library's own class, for a full disk say
        raise SettingsError(f"{path}: cannot be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the facts.

    Raises:
        SettingsError: the file cannot be read, is no such file, or is damaged.
    """
    library = _library()
    try:
        path.open("rb").close()  # its own message says which error it is
        with library.safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            content = (file.metadata() or {}).get(_FACTS)
    except OSError as error:
        raise SettingsError(f"{path}: cannot read it: {error.strerror or error}") from None
    except Exception as error:  # the library's own class
        raise SettingsError(f"{path}: no safetensors file, or damaged ({error})") from None
    if content is None:
        raise SettingsError(f"{path}: a safetensors file, but not one that routeahead wrote")
    facts: dict[str, Any] = json.loads(content)
    if facts.pop("sha256", None) != _digest(tensors):
        raise SettingsError(f"{path}: damaged: its numbers are not those that were written")
    return tensors, facts


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise SettingsError(
            "calibrated routers need safetensors: install routeahead[calibrate]"
        ) from None
    return safetensors
