"""Types of what runs a command in the tests of the command line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]
