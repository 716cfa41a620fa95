"""`config.toml`: values of options that are not given on the command line.

    [defaults]
    io_threads = 4

    [models."/data/qwen3-30b.gguf"]
    cache_mb = "8G"

The order is: command line, `ROUTEAHEAD_*` in the environment, the model's section, `[defaults]`,
what is built in. The keys are those of `KEYS`; in the environment they are written in capitals.
"""

from __future__ import annotations

import difflib
import functools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from routeahead.cli import options
from routeahead.config import Settings
from routeahead.errors import RouteAheadError, SettingsError
from routeahead.hub.reference import PREFIX
from routeahead.setting import check_values

SPIN = "spin"
"""How long OpenMP's idle threads spin (GOMP_SPINCOUNT): a key of `[defaults]`, and no option."""

KEYS = (*(field.name for field in fields(Settings)), "threads", "context")

_UsageError: Any = typer.BadParameter.__base__  # click's, wherever this Typer has it from


def config_path() -> Path:
    """The file: $ROUTEAHEAD_CONFIG, or `routeahead/config.toml` in the user's configuration."""
    if chosen := os.environ.get("ROUTEAHEAD_CONFIG"):
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "routeahead" / "config.toml"


@dataclass(frozen=True)
class Config:
    """The checked contents of a file; empty if there is none."""

    path: Path
    defaults: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]

    def values(self, model: str | None) -> dict[str, Any]:
        """Option → value, for a model as the user named it; None if a verb takes no model."""
        found = {key: value for key, value in self.defaults.items() if key != SPIN}
        if model:
            found |= self.models.get(model_key(model), {})
        return found

    @property
    def spin(self) -> int | None:
        return self.defaults.get(SPIN)


def model_key(model: str) -> str:
    """The name of a model's section: a whole path, or the name on the hub."""
    return model if model.startswith(PREFIX) else str(Path(model).absolute())


def read_config() -> Config:
    """Reads and checks the file.

    Raises:
        SettingsError: it cannot be read, has an unknown key, or a value that its option would not
            take.
    """
    path = config_path()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config(path, {}, {})
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot read it: {error}") from None
    content = _parsed(path, text)
    for section in content:
        if section not in ("defaults", "models"):
            raise SettingsError(
                f'{path}: unknown key {section!r}: write [defaults] or [models."PATH"] above it'
            )
    defaults = _section(path, "defaults", content.get("defaults", {}))
    models = content.get("models", {})
    if not isinstance(models, dict):
        raise SettingsError(f'{path}: models is no table: write [models."PATH"]')
    return Config(path, defaults, {
        name: _section(path, f"models.{name}", values) for name, values in models.items()
    })  # fmt: skip


def _parsed(path: Path, text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    import tomlkit
    import tomlkit.exceptions

    try:
        content: dict[str, Any] = tomlkit.parse(text).unwrap()
    except tomlkit.exceptions.ParseError as error:
        raise SettingsError(f"{path}: no TOML: {error}") from None
    return content


def _section(path: Path, section: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: {section} is no table: write [{section}]")
    for key, value in values.items():
        where = f"{path}: [{section}] {key}"
        known = (*KEYS, SPIN) if section == "defaults" else KEYS
        if key not in known:
            near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; see `routeahead run --help`"
            if key == SPIN:
                hint = ": it is the machine's: write it in [defaults]"
            raise SettingsError(f"{where}: unknown key{hint}")
        try:
            _check(key, value)
        except (RouteAheadError, _UsageError) as error:
            reason = getattr(error, "message", None) or str(error)
            raise SettingsError(f"{where} = {value!r}: {reason.rstrip('.')}") from None
    return values


def _check(key: str, value: Any) -> None:
    """
    Raises:
        SettingsError, click's UsageError: the option would not take the value.
    """
    if key == SPIN:
        if type(value) is not int or value < 0:
            raise SettingsError("give a whole number, 0 or more")
        return
    command = _all_options()
    (option,) = (one for one in command.params if one.name == key)
    if isinstance(value, bool) != option.is_flag:
        raise SettingsError("give true or false" if option.is_flag else "give no true or false")
    if isinstance(value, (list, dict)) != option.multiple or isinstance(value, dict):
        raise SettingsError("give a list" if option.multiple else "give one value")
    cast = command.make_context("", [], default_map={key: value}).params[key]
    if key in ("threads", "context"):
        return
    plain = {name: getattr(Settings, name) for name in (f.name for f in fields(Settings))}
    check_values(Settings(**options.as_settings(plain | {key: cast})))


@functools.cache
def _all_options() -> Any:
    """A command that has every option of KEYS."""
    app = typer.Typer(add_completion=False)

    @app.command()
    @options.with_settings
    def everything(
        threads: options.Threads = None, context: options.Context = None, **settings: Any
    ) -> None:
        pass

    return typer.main.get_command(app)


def write_values(model: str, values: Mapping[str, Any], spin: int | None) -> Path:
    """Puts values into a model's section of the file, and leaves everything else as it is.

    Raises:
        SettingsError: the file that is there cannot be read.
        OSError: it cannot be written.
    """
    import tomlkit

    path = config_path()
    read_config()  # what is wrong with it is said before anything is written
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    content: Any = tomlkit.parse(text)
    if spin is not None:
        content.setdefault("defaults", tomlkit.table())[SPIN] = spin
    models = content.setdefault("models", tomlkit.table(is_super_table=True))
    section = models.setdefault(model_key(model), tomlkit.table())
    section.update(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as new:
        new.write(tomlkit.dumps(content))
        new.flush()
        os.fsync(new.fileno())
    Path(new.name).replace(path)
    return path
