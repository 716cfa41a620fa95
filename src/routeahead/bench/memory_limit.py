"""Runs a command with bounded memory, page cache included, in a control group of its own."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import TracebackType

from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.machine.cgroup import Hierarchy, own_hierarchy, read_counts

# The shell enters the group and then becomes the command, so that every page of it is counted in
# the group. A child's first code in Python would need preexec_fn, which is unsafe beside threads.
_ENTER = 'echo $$ > "$0" && exec "$@"'
_names = count()


class MemoryLimit:
    """A control group with a memory limit; exists while the `with` block runs.

    Attributes:
        limit: bytes.
        folder: the group.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._hierarchy = _required_hierarchy()
        name = f"routeahead-{os.getpid()}-{next(_names)}"
        self.folder = self._hierarchy.parent / name

    def __enter__(self) -> MemoryLimit:
        """Makes the group and sets its limit.

        Raises:
            SettingsError: the system does not permit it.
        """
        try:
            if self._hierarchy.version == 2:
                _delegate_memory(self._hierarchy.parent)
            self.folder.mkdir()
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None
        try:
            self._set_limit()
            self._try_entering()
        except BaseException:
            self.folder.rmdir()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.folder.rmdir()

    def _set_limit(self) -> None:
        """Sets the limit of memory and allows no swap, which would add to it."""
        try:
            (self.folder / self._hierarchy.files.limit).write_text(str(self.limit))
            if self._hierarchy.version == 1:
                # Counts memory and swap together; absent if the kernel does not count swap.
                self._write_if_there("memory.memsw.limit_in_bytes", self.limit)
            else:
                self._write_if_there("memory.swap.max", 0)
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None

    def _write_if_there(self, name: str, value: int) -> None:
        if (self.folder / name).exists():
            (self.folder / name).write_text(str(value))

    def _try_entering(self) -> None:
        tried = subprocess.run(self.wrap(["true"]), capture_output=True, text=True, check=False)
        if tried.returncode:
            raise self._refused(tried.stderr.strip())

    def _refused(self, why: str) -> SettingsError:
        hint = "; as an ordinary user, start this under `systemd-run --user --scope`"
        return SettingsError(
            f"a memory limit of {self.limit // MIB} MiB is not permitted here "
            f"({self._hierarchy.parent}: {why}){hint if self._hierarchy.version == 2 else ''}"
        )

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside the group."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *command]

    def peak_bytes(self) -> int | None:
        """Most bytes used so far, page cache included; None if the kernel does not count them."""
        file = self.folder / self._hierarchy.files.peak
        return int(file.read_text()) if file.exists() else None

    def kills(self) -> int:
        """Processes that the kernel killed for the limit."""
        return read_counts(self.folder / self._hierarchy.files.events).get("oom_kill", 0)


def _required_hierarchy() -> Hierarchy:
    found = own_hierarchy()
    if found is None:
        raise SettingsError("a memory limit needs Linux control groups, and there are none here")
    return found


def _delegate_memory(parent: Path) -> None:
    """Makes groups below `parent` have a memory limit, unless they have one already.

    Raises:
        OSError: not permitted, or there is no controller to hand down.
    """
    control = parent / "cgroup.subtree_control"
    if "memory" in control.read_text().split():
        return
    if "memory" not in (parent / "cgroup.controllers").read_text().split():
        raise OSError(errno.ENODEV, "no memory controller")
    control.write_text("+memory")
