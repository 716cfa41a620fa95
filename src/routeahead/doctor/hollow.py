"""A model of the hub as files with holes: the headers are real, and every weight is zero.

A file system stores no hole, so a model of any size takes some MiB here. llama.cpp loads it, and
computes with it, as it would with the model: no product takes a shortcut for a zero.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from routeahead.errors import ModelError
from routeahead.hub.download import Repository
from routeahead.hub.reference import Reference, RepoFile, choose
from routeahead.hub.store import models_folder
from routeahead.llamacpp.gguf_file import header_bytes
from routeahead.llamacpp.gguf_metadata import HEADER_LIMIT

_PREFIX, _FORGOTTEN_S = ".doctor-", 3600.0
_FIRST = 4 << 20  # bytes of a header that are fetched at first: vocabularies take most of them


@contextlib.contextmanager
def hollow_copy(wanted: Reference) -> Iterator[Path]:
    """Makes the files beside the models that were pulled, and deletes them afterwards.

    Raises:
        ModelError: the hub does not have the model, or a file of it is no GGUF.
        SettingsError: the hub cannot be reached.
    """
    repository = Repository(wanted.repo)
    model = choose(repository.models, wanted)
    root = models_folder()
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_PREFIX}*"):  # of a doctor that was killed
        if time.time() - left.stat().st_mtime > _FORGOTTEN_S:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root) as folder:
        places = [Path(folder) / file.path.rpartition("/")[2] for file in model.files]
        for file, place in zip(model.files, places, strict=True):
            _fetch_header(repository, file, place)
        yield places[0]


def _fetch_header(repository: Repository, file: RepoFile, place: Path) -> None:
    """Fetches as much of a file as its header takes, and makes a hole of the rest."""
    size = _FIRST
    while True:
        repository.fetch(file, place, size)
        try:
            if header_bytes(place) <= min(size, file.size):
                break
            reason = ""
        except ModelError as error:
            reason = str(error)
        if size >= min(file.size, HEADER_LIMIT):
            raise ModelError(f"{file.path}: {reason or 'its header does not end'}")
        size *= 2
    with place.open("r+b") as output:
        output.truncate(file.size)
