"""Options that several verbs share, and how their text becomes settings."""

from __future__ import annotations

import functools
import inspect
import random
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from routeahead.cli.terminal import note
from routeahead.config import GpuLayers, Rows, Settings
from routeahead.errors import SettingsError
from routeahead.hub.download import pull
from routeahead.hub.reference import PREFIX, is_reference
from routeahead.hub.reference import parse as parse_reference
from routeahead.hub.store import locate
from routeahead.models import DEFAULT_MODEL
from routeahead.policies.settings import CacheSize
from routeahead.setting import (
    EXPERIMENTS,
    POLICIES,
    ROUTE_AHEAD,
    STREAMING,
    Facts,
    facts_of,
    types_of,
)

TRACES = "Traces"
SAMPLING = "Sampling"

_SIZE = re.compile(r"^([+-]?\d+(?:\.\d+)?)\s*(?:([MGT])(?:i?B)?)?$", re.IGNORECASE)
_MIB = {"m": 1, "M": 1, "g": 1024, "G": 1024, "t": 1 << 20, "T": 1 << 20, None: 1}

Model = Annotated[
    Path | None,
    typer.Argument(
        help="GGUF file (of a split model, any of its shards), or hf:OWNER/REPO:QUANT.",
        show_default="the built-in model, small, to try things out",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", min=1, max=512, help="Compute threads.", show_default="free cores"),
]
Context = Annotated[
    int | None,
    typer.Option(
        "-c",
        min=8,
        max=1 << 30,
        help="Context in tokens.",
        show_default="4096, or the model's if smaller",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Work on the nodes of this Ray cluster: HOST:PORT, auto, or local for this machine.",
    ),
]
Csv = Annotated[
    Path | None, typer.Option(help="Write a row a decoded token.", rich_help_panel=TRACES)
]
IoTrace = Annotated[
    Path | None,
    typer.Option(help="Write every read (.csv or .parquet).", rich_help_panel=TRACES),
]
RouteTrace = Annotated[
    Path | None,
    typer.Option(help="Write every routing (.csv or .parquet).", rich_help_panel=TRACES),
]
RouteScores = Annotated[
    bool,
    typer.Option(
        "--route-scores",
        help="With --route-trace: also the scores of all experts, as each router ranked them.",
        rich_help_panel=TRACES,
    ),
]
ForcedTokens = Annotated[
    str,
    typer.Option(
        help="Feed these tokens instead of sampling: a file of ids, or seed:N for random ones.",
        rich_help_panel=EXPERIMENTS,
    ),
]


def with_settings(
    command: Callable[..., None], only: Collection[str] | None = None
) -> Callable[..., None]:
    """Gives a command that takes `**settings` an option for each field of `Settings`.

    The command gets keyword arguments for `routeahead.Llama`.

    Args:
        only: the fields that get one; None for all.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    names = {parameter.name for parameter in own}

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {name: value for name, value in values.items() if name in names}
        settings = {name: value for name, value in values.items() if name not in names}
        command(**given, **as_settings(settings))

    added = [one for one in _setting_parameters() if only is None or one.name in only]
    parameters = [*own, *added]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def as_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Settings` from the values of their options.

    Raises:
        SettingsError: the cache's size or the ubatch's is none.
    """
    # Not every Typer makes a path of a text before the command is called.
    paths = {
        name: Path(value)
        for name, kind in types_of(Settings).items()
        if Path in get_args(kind) and isinstance(value := values.get(name), str)
    }
    parsers: dict[str, Callable[[Any], Any]] = {
        "cache_mb": cache_size, "n_gpu_layers": gpu_layers, "policy": tuple, "ubatch": ubatch_rows,
        "route_ahead": whole_if_it_is,
    }  # fmt: skip
    parsed = {name: parse(values[name]) for name, parse in parsers.items() if name in values}
    return values | paths | parsed


def _setting_parameters() -> list[inspect.Parameter]:
    """An option for each setting, by the headings of `--help`."""
    panels = (STREAMING, ROUTE_AHEAD, POLICIES, EXPERIMENTS)
    kinds, facts = types_of(Settings), facts_of(Settings)
    order = sorted(facts, key=lambda name: panels.index(facts[name].panel))
    return [_parameter(name, kinds[name], facts[name]) for name in order]


def _parameter(name: str, kind: Any, facts: Facts) -> inspect.Parameter:
    default = getattr(Settings, name)
    flags = facts.flags or ([f"--{name.replace('_', '-')}"] if default is False else [])
    option = typer.Option(
        *flags,
        help=_help(facts),
        rich_help_panel=facts.panel,
        metavar=facts.metavar or ("|".join(kind.__args__) if _is_choice(kind) else None),
        show_default=facts.unset or True,
    )
    if _is_choice(kind) or kind in (CacheSize, GpuLayers):
        kind, default = str, str(default)  # checked by `Settings`, like every other value
    elif get_origin(kind) is tuple:
        kind, default = list[str], list(default)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _help(facts: Facts) -> str:
    """The text with the settings that it needs written as flags."""
    text = facts.help
    for needed in facts.needs:
        text = text.replace(f"With {needed}:", f"With --{needed.replace('_', '-')}:")
    return text


def cache_size(text: str) -> CacheSize:
    """'auto', or MiB: a whole number, or a number with a unit such as 4G or 4000M.

    Raises:
        SettingsError: neither.
    """
    if text == "auto":
        return "auto"
    try:
        return mib(text)
    except ValueError:
        raise SettingsError(
            f"--cache-mb {text}: give a size such as 4000 (MiB), 4G, 0, or auto"
        ) from None


def ubatch_rows(text: str) -> Rows:
    """'auto', or a whole number.

    Raises:
        SettingsError: neither.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise SettingsError(f"--ubatch {text}: give a number of rows such as 1024, or auto")
    return int(text)


def whole_if_it_is(number: float) -> float:
    """2 of 2.0: so that what is written down is the number that was given."""
    return int(number) if float(number).is_integer() else number


def gpu_layers(text: str) -> GpuLayers:
    """'auto', 'all', or a number of layers.

    Raises:
        SettingsError: neither.
    """
    if text in ("auto", "all"):
        return "auto" if text == "auto" else "all"
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"--gpu-layers {text}: give a number of layers, auto or all") from None


def mib(text: str) -> int:
    """A size in MiB: "4000", "4000M", "4000 MiB" and "3.9G" are sizes.

    Raises:
        ValueError: it is no size.
    """
    found = _SIZE.match(text)
    if not found:
        raise ValueError(f"{text!r} is no size: give MiB, or a number with M, G or T, such as 4G")
    number, unit = found.groups()
    return int(number) if not unit and "." not in number else round(float(number) * _MIB[unit])


def size_option(text: Any) -> int:
    """`mib` as the parser of an option that takes no negative size."""
    try:
        value = text if isinstance(text, int) else mib(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if value < 0:
        raise typer.BadParameter(f"{text}: a size cannot be negative")
    return value


def model_path(given: Path | None) -> Path:
    """The file of the model to use: the built-in one if none was given.

    One of the hub is fetched if it is not here; if it is, nothing asks the network.

    Raises:
        ModelError: the hub does not have it.
        SettingsError: it cannot be fetched.
    """
    text = "" if given is None else str(given)
    if text.startswith(PREFIX):
        wanted = parse_reference(text)
        return locate(wanted) or pull(wanted, note)
    if given:
        check_path(given)
    return given or DEFAULT_MODEL


def check_path(given: Path) -> None:
    """
    Raises:
        SettingsError: there is no such file, and it looks like a model of the hub.
    """
    text = str(given)
    if is_reference(text) and not text.endswith(".gguf") and not given.exists():
        raise SettingsError(f"{text}: no such file; if it is a model of the hub, write hf:{text}")


def announce(given: Path | None) -> None:
    """Says that the built-in model is used, because a forgotten path would go unnoticed."""
    if given is None:
        note("no model given: this is the built-in one, small, to try things out")


def tokens_file(text: str) -> Path | None:
    """The file of `--forced-tokens`; None if the tokens come from elsewhere."""
    return Path(text) if text and not text.startswith("seed:") else None


def forced_tokens(text: str, count: int, n_vocab: int) -> list[int]:
    """At most `count` token ids: from a file (integers between white space), or random.

    Raises:
        SettingsError: the file cannot be read, or an id is not in the vocabulary.
    """
    if text.startswith("seed:"):
        try:
            rng = random.Random(int(text[5:]))
        except ValueError:
            raise SettingsError(f"--forced-tokens {text}: give seed:NUMBER") from None
        return [rng.randrange(n_vocab) for _ in range(count)]
    try:
        tokens = [int(word) for word in Path(text).read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"--forced-tokens {text}: cannot read token ids: {error}") from None
    if not tokens:
        raise SettingsError(f"--forced-tokens {text}: no token ids in it")
    strange = [t for t in tokens if not 0 <= t < n_vocab]
    if strange:
        raise SettingsError(f"--forced-tokens {text}: {strange[0]} is not one of {n_vocab} ids")
    return tokens[:count]
