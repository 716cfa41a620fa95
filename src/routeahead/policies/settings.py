"""What the settings of a built-in policy have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from routeahead.routing.policy import Model, Policy
from routeahead.setting import STREAMING, setting

CacheSize = int | Literal["auto"]


@dataclass(frozen=True)
class PolicySettings:
    """Base of each policy's settings; `config.Settings` inherits from all of them."""

    cache_mb: CacheSize = setting(
        "auto",
        "Expert cache in MiB, or as 4G; 'auto' sizes it from free memory, 0 keeps nothing.",
        STREAMING,
        low=0,
        metavar="SIZE",
    )

    def check(self) -> None:
        """Checks what no single field says.

        Raises:
            SettingsError: these settings make no sense together.
        """

    def make(self, model: Model) -> Policy | None:
        """The policy with these settings; None if it is off.

        Raises:
            SettingsError: they do not fit the model.
        """
        return None
