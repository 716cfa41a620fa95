"""Pulls a model from the Hugging Face hub into the folder of models.

The library knows the hub's addresses, tokens, redirects and retries. What a killed process had
fetched stays, and the next pull goes on behind it: the library's own `hf_hub_download` begins
anew there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from routeahead.errors import ModelError, RouteAheadError, SettingsError
from routeahead.hub.reference import ModelFiles, Reference, RepoFile, amount, choose, models_of
from routeahead.hub.store import LOCK, folder_of, part_of

Say = Callable[[str], None]

_PIECE = 8 << 20  # bytes hashed at a time
_SPARE = 64 << 20  # bytes of the disk that stay free


def library() -> Any:
    """The module `huggingface_hub`.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"models of the hub need the package {error.name}: pip install 'routeahead[hub]'"
        ) from None
    return huggingface_hub


class Repository:
    """A repository of the hub, at the commit that it has now.

    Attributes:
        models: what can be pulled from it.
    """

    def __init__(self, repo: str) -> None:
        """
        Raises:
            ModelError: it does not exist, or may not be read.
            SettingsError: the library is not installed, or the hub cannot be reached.
        """
        self.repo, self._hub = repo, library()
        with _told(repo):
            info = self._hub.HfApi().model_info(repo, files_metadata=True)
        self._commit = info.sha
        files = (
            RepoFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else "")
            for one in info.siblings or ()
        )
        self.models = [model for model in models_of(files) if model.complete]

    def fetch(self, file: RepoFile, target: Path, size: int | None = None) -> None:
        """Fetches a file, or its first `size` bytes, behind what `target` has of it already.

        Raises:
            ModelError: the file may not be read.
            SettingsError: the hub cannot be reached, or stops sending.
        """
        hub, wanted = self._hub, file.size if size is None else min(size, file.size)
        with _told(self.repo), target.open("ab") as output:
            here = output.tell()
            if here >= wanted:
                return
            if wanted - here > hub.constants.MAX_HTTP_DOWNLOAD_SIZE:
                raise ModelError(
                    f"{file.path}: the hub sends no {amount(file.size)} in one piece: fetch "
                    f"it with `hf download {self.repo} {file.path}`, and give its path"
                )
            url = hub.hf_hub_url(self.repo, file.path, revision=self._commit)
            location = hub.get_hf_file_metadata(url, headers=self._headers()).location
            headers = self._headers()
            if urlsplit(location).netloc != urlsplit(url).netloc:
                headers.pop("authorization", None)  # it is the hub's, and not for others
            if size is not None:
                headers["Range"] = f"bytes={here}-{wanted - 1}"
            hub.file_download.http_get(
                location,
                output,
                headers=headers,
                resume_size=here if size is None else 0,
                expected_size=wanted - (0 if size is None else here),
                displayed_filename=file.path.rpartition("/")[2],
            )

    def _headers(self) -> dict[str, str]:
        made: dict[str, str] = self._hub.utils.build_hf_headers()
        return made


def pull(wanted: Reference, say: Say) -> Path:
    """Brings a model here, or what is absent of it, and returns the file to open.

    Each file is compared with the hub's checksum, also one that is here already.

    Args:
        say: is told, in words, what begins.

    Raises:
        ModelError: the model does not exist or may not be read, or what came is not what the hub
            has.
        SettingsError: no room, no network, no library, or another process pulls it.
    """
    repository = Repository(wanted.repo)
    model = choose(repository.models, wanted)
    folder = folder_of(wanted.repo)
    with _alone(folder):
        _check_room(folder, model)
        # The first shard last: a set is there when the file is that one opens.
        for file in reversed(model.files):
            _bring(repository, file, folder / file.path, say)
    return folder / model.files[0].path


def _bring(repository: Repository, file: RepoFile, place: Path, say: Say) -> None:
    """Gives a file its name when its bytes are right."""
    if not file.sha256:
        raise ModelError(f"{file.path}: the hub has no checksum of it; fetch it by other means")
    if place.exists() and place.stat().st_size == file.size:
        say(f"comparing {place.name}, which is here, with its checksum")
        if _sha256(place) == file.sha256:
            return
    part = part_of(place, file.sha256)
    part.parent.mkdir(parents=True, exist_ok=True)
    repository.fetch(file, part)
    say(f"comparing {place.name} with its checksum")
    found = _sha256(part)
    if found != file.sha256:
        part.unlink()
        raise ModelError(
            f"{file.path}: what came is not what the hub has (SHA-256 {found[:12]}… and not "
            f"{file.sha256[:12]}…): deleted; pull again"
        )
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(place)


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def _check_room(folder: Path, model: ModelFiles) -> None:
    """
    Raises:
        SettingsError: what is still to come does not fit on the disk.
    """
    need = 0
    for file in model.files:
        place = folder / file.path
        part = part_of(place, file.sha256)
        here = place.exists() and place.stat().st_size == file.size
        need += 0 if here else file.size - (part.stat().st_size if part.exists() else 0)
    free = shutil.disk_usage(folder).free
    if need and need + _SPARE > free:
        raise SettingsError(
            f"{folder}: {amount(need)} are to come and {amount(free)} are free: make "
            "room, or put the models elsewhere with ROUTEAHEAD_MODELS=FOLDER"
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes from pulling into a folder; a killed one keeps nobody out."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"{folder}: another process pulls into it; wait until it is done"
            ) from None
        yield


@contextlib.contextmanager
def _told(repo: str) -> Iterator[None]:
    """Makes what the library raises one line.

    Raises:
        ModelError: the hub refuses.
        SettingsError: it cannot be reached.
    """
    errors = library().errors
    page = f"{library().constants.ENDPOINT}/{repo}"
    try:
        yield
    except RouteAheadError:
        raise
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo}: gated: accept its terms at {page}, then log in with `hf auth login` or set "
            "HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{repo}: the hub has no such repository, or it is private: check the name, or log in "
            "with `hf auth login` or HF_TOKEN"
        ) from None
    except errors.HFValidationError:
        raise ModelError(f"{repo}: not a name that a repository can have") from None
    except errors.OfflineModeIsEnabled:
        raise SettingsError(
            f"{repo}: HF_HUB_OFFLINE is set, and this is not here: unset it to fetch it"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "log in with `hf auth login` or HF_TOKEN" if status in (401, 403) else "try later"
        raise SettingsError(f"{repo}: the hub answered with status {status}: {hint}") from None
    except errors.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise SettingsError(
            f"{page}: cannot be reached ({reason}): what came is kept; pull again"
        ) from None
    except OSError as error:  # a full disk, or fewer bytes than the hub said
        reason = error.strerror or str(error).partition("\n")[0]
        raise SettingsError(f"{repo}: {reason}: what came is kept; pull again") from None
