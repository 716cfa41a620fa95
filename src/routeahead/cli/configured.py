"""The class of every verb: its options have values from the environment and from `config.toml`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from routeahead.cli.config_file import KEYS, Config, read_config
from routeahead.config import Settings
from routeahead.errors import SettingsError
from routeahead.models import DEFAULT_MODEL
from routeahead.setting import STREAMING, facts_of

ENVIRONMENT = "ROUTEAHEAD"

# What a resident run would refuse, since it streams nothing; a file says it for all other runs.
_STREAMING = {name for name, facts in facts_of(Settings).items() if facts.panel == STREAMING}


class ConfiguredCommand(TyperCommand):
    """A verb. Flags win over `ROUTEAHEAD_*`, those over `config.toml`, that over the default."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.context_settings["auto_envvar_prefix"] = ENVIRONMENT
        options: list[Any] = self.params  # of classes that Typer has changed more than once
        for option in options:
            if option.param_type_name == "option":
                option.allow_from_autoenv = option.name in KEYS
                option.show_envvar = bool(option.envvar)  # --help would name each of them

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and any(option.name in KEYS for option in self.params):
            given = self.make_parser(ctx).parse_args(args=list(args))[0]
            ctx.obj = config = read_config()
            ctx.default_map = self._values(config, given)
        return super().parse_args(ctx, args)

    def _values(self, config: Config, given: dict[str, Any]) -> dict[str, Any]:
        """Values for the options that this verb has."""
        model = given.get("model") or DEFAULT_MODEL
        takes_model = any(option.name == "model" for option in self.params)
        values = config.values(str(model) if takes_model else None)
        names = {option.name for option in self.params} & values.keys()
        if given.get("resident"):
            names -= _STREAMING
        return {name: values[name] for name in names}

    def invoke(self, ctx: Any) -> Any:
        """Says of an error which of the values that it names are not from the command line."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            config, text = ctx.obj, str(error)
            named = [
                name
                for name in ctx.default_map or ()
                if ctx.get_parameter_source(name).name == "DEFAULT_MAP" and name in text
            ]
            if not named or not isinstance(config, Config):
                raise
            raise SettingsError(f"{text} ({', '.join(named)}: from {config.path})") from error
