"""The policies of one model: made from its settings, and called where each hook is due."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from routeahead.config import Settings
from routeahead.errors import SettingsError
from routeahead.routing.policy import Model, Policy
from routeahead.telemetry.counters import Totals

P = TypeVar("P", bound=Policy)


class Policies:
    """All policies of a model, in the order of their hooks.

    Each list has the policies that override a hook, so that a hook that nobody has costs nothing.
    """

    def __init__(self, policies: Sequence[Policy] = ()) -> None:
        self.all = tuple(policies)
        self.begin = self._having("begin")
        self.routed = self._having("routed")
        self.predict = self._having("predict")
        self.weighted = self._having("weighted")
        self.issued = self._having("issued")
        self.product = self._having("product")
        self.end = self._having("end")
        self.wants_hidden = self._having("wants_hidden")
        self.before_attention = self._having("before_attention")
        self.count = self._having("count")

    def _having(self, hook: str) -> tuple[Policy, ...]:
        base = getattr(Policy, hook)
        return tuple(p for p in self.all if getattr(type(p), hook) is not base)

    def __bool__(self) -> bool:
        return bool(self.all)

    def find(self, kind: type[P]) -> P | None:
        """The policy of that class; None if there is none."""
        return next((policy for policy in self.all if isinstance(policy, kind)), None)

    @property
    def reads_early(self) -> str:
        """What the report calls the early reads; empty if no policy makes any."""
        return next((policy.reads_early for policy in self.all if policy.reads_early), "")

    def recover(self) -> None:
        for policy in self.all:
            policy.recover()

    def close(self) -> None:
        for policy in self.all:
            policy.close()

    def report(self, decode: Totals) -> dict[str, Any]:
        """A key for each policy that has something to report."""
        reports = ((p.name or type(p).__name__, p.report(decode)) for p in self.all)
        return {name: facts for name, facts in reports if facts}

    def lines(self, decode: Totals) -> list[str]:
        """The same for a terminal."""
        return [line for policy in self.all for line in policy.lines(decode)]


def make_policies(settings: Settings, model: Model, given: Sequence[Policy]) -> Policies:
    """The built-in policies that are on, those named in the settings, then those `given`.

    Raises:
        SettingsError: a setting does not fit the model, or a policy cannot be loaded.
    """
    policies = [*settings.policies(model), *map(load_policy, settings.policy), *given]
    model = replace(model, policies=policies)
    for policy in policies:
        policy.bind(model)
    return Policies(policies)


def load_policy(name: str) -> Policy:
    """A policy of a class that is named as `module:Class`; the current folder is searched too.

    Raises:
        SettingsError: there is no such class, it is no policy, or it cannot be made.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise SettingsError(f"policy {name!r}: give MODULE:CLASS, as in examples.swap_policy:Swap")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # whatever the module's own code raises
        reason = " ".join(str(error).split())
        raise SettingsError(f"policy {name!r}: {type(error).__name__}: {reason}") from error
    if not isinstance(made, Policy):
        raise SettingsError(f"policy {name!r}: is no routeahead.Policy; derive the class from it")
    return made
