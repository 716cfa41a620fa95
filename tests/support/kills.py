"""Commands that are killed at random moments, again and again, until one gets to its end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@dataclass
class Campaign:
    """Starts `command` and ends it at a random moment of `span_s`, `kills` times; then lets it end.

    Attributes:
        check: looks at what the command has left, whenever it has ended.
        again: called when it came to its end before the signal: begins anew.
        counts: signal → how many it ended; "ended" → how often it was faster.
    """

    command: Sequence[object]
    check: Callable[[], None]
    again: Callable[[], None]
    span_s: float
    counts: dict[str, int] = field(default_factory=dict)

    def run(self, rng: random.Random, kills: int) -> dict[str, int]:
        while sum(self.counts.values()) - self.counts.get("ended", 0) < kills:
            self._once(rng.choice(SIGNALS), rng.uniform(0.2, self.span_s))
        self._finish()
        return self.counts

    def _start(self) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "routeahead.cli.main", *map(str, self.command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(line, **pipes)  # type: ignore[call-overload,no-any-return]

    def _once(self, number: signal.Signals, after_s: float) -> None:
        process = self._start()
        time.sleep(after_s)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        # In the first and last moments the default action, which is to die of it, is in place.
        assert process.returncode in (0, -number, 128 + number), (
            process.returncode,
            number,
            errors,
        )
        assert "Traceback" not in errors, (number, errors)
        self.check()
        name = number.name if process.returncode else "ended"
        self.counts[name] = self.counts.get(name, 0) + 1
        if not process.returncode:
            self.again()

    def _finish(self) -> None:
        process = self._start()
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        self.check()
