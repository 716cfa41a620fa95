"""The folder of models that were pulled: plain files, `owner/repo/` and then as in the repository.

A file has its name only when all of its bytes have been compared with the hub's checksum. Until
then it is a hidden one beside its place, whose name has the checksum, so that a later pull goes on
with it, and none goes on with bytes of another version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from routeahead.errors import ModelError
from routeahead.hub.reference import ModelFiles, Reference, RepoFile, choose, meant, models_of

LOCK = ".pull.lock"
"""Held, in a repository's folder, by the process that pulls into it."""

_PART = ".part"


def models_folder() -> Path:
    """Where models are: $ROUTEAHEAD_MODELS, or `routeahead/models` among the user's data."""
    if chosen := os.environ.get("ROUTEAHEAD_MODELS"):
        return Path(chosen)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "routeahead" / "models"


def part_of(place: Path, sha256: str) -> Path:
    """Where the bytes of a file are until they are known to be right."""
    return place.with_name(f".{place.name}.{sha256[:16]}{_PART}")


@dataclass(frozen=True)
class Stored:
    """A model in the folder.

    Attributes:
        paths: its files, the one to open first.
        size: bytes.
        changed_s: when its first file was written, in seconds since the epoch.
    """

    reference: Reference
    paths: list[Path]
    size: int
    changed_s: float


def stored() -> Iterator[Stored]:
    """All models in the folder, by name."""
    root = models_folder()
    for folder in sorted(root.glob("*/*/")):
        repo = folder.relative_to(root).as_posix()
        for model in _models(folder):
            if model.complete:
                paths = [folder / file.path for file in model.files]
                reference = Reference(repo, model.quant)
                yield Stored(reference, paths, model.size, paths[0].stat().st_mtime)


def unfinished() -> Iterator[tuple[Path, int]]:
    """(place, bytes so far) of each file of which a part is here."""
    for part in sorted(models_folder().rglob(f".*{_PART}")):
        yield _place(part), part.stat().st_size


def locate(wanted: Reference) -> Path | None:
    """The file to open of a model; None if it is not here.

    Raises:
        ModelError: several are called so.
    """
    folder = folder_of(wanted.repo)
    models = [model for model in _models(folder) if model.complete]
    return folder / choose(models, wanted).files[0].path if meant(models, wanted) else None


def remove(wanted: Reference) -> tuple[str, int]:
    """Deletes a model, and what is unfinished of it; (its name, bytes).

    Raises:
        ModelError: it is not here, or several are called so.
        OSError: a file cannot be deleted.
    """
    folder = folder_of(wanted.repo)
    models = _models(folder, parts=True)
    if not models:
        raise ModelError(f"{wanted}: not among the models here; `routeahead list` shows them")
    model = choose(models, wanted)
    places = {folder / file.path for file in model.files}
    doomed = [place for place in places if place.exists()]
    doomed += [part for part in folder.rglob(f".*{_PART}") if _place(part) in places]
    freed = sum(path.stat().st_size for path in doomed)
    for path in doomed:
        path.unlink()
    _prune(folder)
    return f"{wanted.repo}:{model.quant}", freed


def folder_of(repo: str) -> Path:
    """Where the files of a repository are."""
    return models_folder() / repo


def _models(folder: Path, *, parts: bool = False) -> list[ModelFiles]:
    """The models of a repository's folder; with `parts` also those of which only a part is here."""
    found = set(folder.rglob("*.gguf"))
    if parts:
        found |= {_place(part) for part in folder.rglob(f".*{_PART}")}
    return models_of(
        RepoFile(path.relative_to(folder).as_posix(), path.stat().st_size if path.exists() else 0)
        for path in found
    )


def _place(part: Path) -> Path:
    """The file that a part will be."""
    return part.with_name(part.name[1:].removesuffix(_PART).rpartition(".")[0])


def _prune(folder: Path) -> None:
    """Deletes a repository's folder, and its owner's, as far as they are empty."""
    for one in [*sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True),
                folder, folder.parent]:  # fmt: skip
        (one / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            one.rmdir()
