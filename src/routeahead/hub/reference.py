"""What a user calls a model of the hub, and which files of a repository that means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from routeahead.errors import ModelError, SettingsError

PREFIX = "hf:"

# What llama.cpp takes, too, where nobody names a quantisation.
_DEFAULT = "q4_k_m"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(rf"^(?:hf:)?({_NAME})/({_NAME})(?::([^:]+))?$")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q|TQ)\d+(?:_\w+)?|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reference:
    """`owner/repo:quant`; `quant` is empty if nobody named one."""

    repo: str
    quant: str

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def is_reference(text: str) -> bool:
    """Whether `parse` takes it."""
    return ".." not in text and _REFERENCE.match(text) is not None


def parse(text: str) -> Reference:
    """Reads `owner/repo:quant`, with or without `hf:` before it.

    Raises:
        SettingsError: it is none.
    """
    found = _REFERENCE.match(text)
    if not found or not is_reference(text):
        raise SettingsError(
            f"{text}: no model of the hub: write owner/repo:quant, such as "
            "unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"
        )
    owner, repo, quant = found.groups()
    return Reference(f"{owner}/{repo}", quant or "")


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        path: within the repository.
        size: bytes.
        sha256: of its content, in hex; empty if the hub does not say.
    """

    path: str
    size: int
    sha256: str = ""


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model: one, or all shards of a set in their order.

    Attributes:
        quant: as the name says, such as Q4_K_M; the whole name if it says none.
    """

    stem: str
    quant: str
    files: Sequence[RepoFile]

    @property
    def size(self) -> int:
        """Bytes, of all files."""
        return sum(file.size for file in self.files)

    @property
    def complete(self) -> bool:
        """Whether no shard is absent."""
        places = [_SHARD.search(file.path.removesuffix(".gguf")) for file in self.files]
        if not places[0]:
            return len(places) == 1
        numbers = [int(place[1]) for place in places if place]
        return numbers == list(range(1, int(places[0][2]) + 1))


def models_of(files: Iterable[RepoFile]) -> list[ModelFiles]:
    """The models among the files of a repository, by name."""
    found: dict[str, list[RepoFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        stem = file.path.removesuffix(".gguf")
        name = stem.rpartition("/")[2].lower()
        if stem != file.path and not name.startswith(("mmproj", "imatrix", ".")):
            found.setdefault(_SHARD.sub("", stem), []).append(file)
    return [ModelFiles(stem, _quant(stem), shards) for stem, shards in found.items()]


def _quant(stem: str) -> str:
    match = _QUANT.search(stem)
    return match[1] if match else stem.rpartition("/")[2]


def amount(nbytes: int) -> str:
    """Bytes as people read them on the hub's pages: decimal."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def meant(models: Sequence[ModelFiles], wanted: Reference) -> list[ModelFiles]:
    """Those of `models` that `wanted` may mean.

    Without a quantisation it is Q4_K_M, or the only one there is.
    """
    quant = wanted.quant.lower()
    if not quant:
        quant = _DEFAULT if len(models) > 1 else "".join(one.quant.lower() for one in models)
    exact = [one for one in models if quant == one.quant.lower() or quant in _files_called(one)]
    return exact or [one for one in models if f"ud-{quant}" == one.quant.lower()]


def choose(models: Sequence[ModelFiles], wanted: Reference) -> ModelFiles:
    """The one model that is meant.

    Raises:
        ModelError: there is none, or several are meant; the message lists what there is.
    """
    found = meant(models, wanted)
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(model.stem.rpartition("/")[2] for model in found)
        raise ModelError(f"{wanted}: several are called so; write one of {listed} after the colon")
    listed = ", ".join(f"{model.quant} ({amount(model.size)})" for model in models)
    there = f"has {listed}" if listed else "has no GGUF model in it"
    raise ModelError(f"{wanted}: {'no such quantisation' if models else 'nothing to run'}; "
                     f"{wanted.repo} {there}")  # fmt: skip


def _files_called(model: ModelFiles) -> set[str]:
    """Names by which a user may copy it from the hub's page."""
    stem, first = model.stem.lower(), model.files[0].path.lower()
    return {stem, f"{stem}.gguf", first, stem.rpartition("/")[2], first.rpartition("/")[2]}
