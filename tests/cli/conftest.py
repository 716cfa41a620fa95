"""Fixtures of the tests of the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings

import pytest
from support.commands import Command, Done

from routeahead.cli.main import main

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
