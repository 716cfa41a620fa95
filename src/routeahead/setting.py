"""How a setting is declared: once, as a dataclass field that carries everything known about it.

The command line's options, the checks and the text of the errors are made from these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from routeahead.errors import SettingsError

# Headings of `--help`.
STREAMING = "Streaming"
ROUTE_AHEAD = "Route-ahead"
POLICIES = "Other policies"
EXPERIMENTS = "Experiments"

_FACTS = "setting"


@dataclass(frozen=True)
class Facts:
    """What is known of a setting beside its type and default.

    Attributes:
        help: one sentence for `--help`.
        panel: heading of `--help` under which it stands.
        low, high: range of its value, both inclusive; None if there is no bound.
        flags: of the command line; empty for one that is spelt as the field.
        metavar: what stands for the value in `--help`; None for the type's name.
        unset: what `--help` shows for a default of None.
        excludes: settings that may not be on beside it, each with the reason.
        needs: it has no effect unless one of these is on; empty if it needs none.
        asks_cache: it looks at what is in the expert cache, so there has to be one.
        sways_cache: with it, what is in the expert cache depends on how fast the disk is, so it may
            not be on beside one that asks.
    """

    help: str
    panel: str
    low: float | None = None
    high: float | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    unset: str | None = None
    excludes: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    asks_cache: bool = False
    sways_cache: bool = False


def setting(default: Any, help: str, panel: str, **facts: Any) -> Any:
    """A dataclass field for a setting; `facts` are the fields of `Facts`."""
    return field(default=default, metadata={_FACTS: Facts(help, panel, **facts)})


def facts_of(owner: type) -> dict[str, Facts]:
    """The facts of each setting of a dataclass, in the order of its fields."""
    return {f.name: f.metadata[_FACTS] for f in fields(owner)}


def types_of(owner: type) -> dict[str, Any]:
    """The type of each setting of a dataclass."""
    return get_type_hints(owner)


def paths_of(owner: type) -> set[str]:
    """The settings of a dataclass that name a file."""
    return {name for name, kind in types_of(owner).items() if Path in _options(kind)}


def check_values(settings: Any) -> None:
    """Checks type and range of each setting of a dataclass.

    Raises:
        SettingsError: a value is of another type or out of range.
    """
    kinds = types_of(type(settings))
    for name, facts in facts_of(type(settings)).items():
        value = getattr(settings, name)
        wanted = _mismatch(kinds[name], value)
        if wanted:
            raise SettingsError(f"{name} is {value!r}: give {wanted}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_range(name, value, facts)


def check_together(settings: Any) -> None:
    """Checks which settings of a dataclass go together.

    Raises:
        SettingsError: two exclude each other, or one has no effect without another.
    """
    owner = type(settings)
    for name, facts in facts_of(owner).items():
        for other, why in facts.excludes.items():
            if is_on(settings, name) and is_on(settings, other):
                raise SettingsError(f"{name} and {other} exclude each other: {why}")
        changed = getattr(settings, name) != getattr(owner, name)
        if changed and facts.needs and not any(is_on(settings, other) for other in facts.needs):
            raise SettingsError(f"{name} has no effect without {' or '.join(facts.needs)}")
        for other in asking(settings) if facts.sways_cache and is_on(settings, name) else ():
            raise SettingsError(
                f"{name} and {other} exclude each other: the output would depend on how fast the "
                "disk is"
            )
        if facts.asks_cache and is_on(settings, name) and settings.cache_mb == 0:
            raise SettingsError(
                f"{name} asks what is in the cache, and cache_mb=0 keeps nothing: give a size"
            )


def is_on(settings: Any, name: str) -> bool:
    """Whether a setting of a dataclass does anything: 0 does, where nothing is given as None."""
    value = getattr(settings, name)
    if getattr(type(settings), name) is None:
        return value is not None and value is not False
    return bool(value)


def asking(settings: Any) -> list[str]:
    """The settings of a dataclass that are on and ask what is in the expert cache."""
    owner = type(settings)
    return [name for name, f in facts_of(owner).items() if f.asks_cache and is_on(settings, name)]


def _check_range(name: str, value: float, facts: Facts) -> None:
    low, high = facts.low, facts.high
    # Written so that NaN, for which every comparison is false, is refused.
    if (low is None or value >= low) and (high is None or value <= high):
        return
    if low is not None and high is not None:
        raise SettingsError(f"{name} is {value}: give {low} to {high}")
    if low == 0:
        raise SettingsError(f"{name} is {value}: it cannot be negative")
    raise SettingsError(f"{name} is {value}: give at least {low}")


def _mismatch(kind: Any, value: Any) -> str:
    """What should have been given; empty if `value` is of the type."""
    options = _options(kind)
    if any(_fits(option, value) for option in options):
        return ""
    choices = [repr(c) for option in options if get_origin(option) is Literal
               for c in get_args(option)]  # fmt: skip
    names = [_NAMES[o] for o in options if o in _NAMES]
    if any(get_origin(option) is tuple for option in options):
        names.append("a sequence of texts")
    return " or ".join([*names, *choices])


_NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    Path: "a path",
    NoneType: "None",
}


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union; a type itself if it is none."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(option: Any, value: Any) -> bool:
    origin = get_origin(option)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(option)
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    if option in (int, float) and isinstance(value, bool):
        return False
    if option is float:
        return isinstance(value, (int, float))
    return isinstance(value, option)
