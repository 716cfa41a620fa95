"""Fixtures of the tests of the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import Command, Done

from routeahead.cli.main import main

if TYPE_CHECKING:
    from support.hub import Hub

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that `main` handles


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command in this process: its entry point, from the arguments to the exit status."""

    def call(*arguments: object) -> Done:
        line = ["routeahead", *map(str, arguments)]
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", line)
            changed.setattr(sys, "unraisablehook", sys.unraisablehook)  # `main` sets these
            changed.setattr(warnings, "showwarning", warnings.showwarning)
            capfd.readouterr()
            handlers = {one: signal.getsignal(one) for one in SIGNALS}
            try:
                with pytest.raises(SystemExit) as ended:
                    main()
            finally:
                for one, handler in handlers.items():
                    signal.signal(one, handler)
        return subprocess.CompletedProcess(line, ended.value.code, *capfd.readouterr())

    return call


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub without models; the command and its children use it, and a folder of their own."""
    import huggingface_hub.constants
    from support.hub import Hub

    hub = Hub()
    for name, value in {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": tmp_path / "hf",
        "HF_TOKEN": "",
        "ROUTEAHEAD_MODELS": tmp_path / "models",
    }.items():
        monkeypatch.setenv(name, str(value))
    # The library read its environment when another test imported it.
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    yield hub
    hub.close()
