"""Runs a command with a bounded memory, page cache included, in a control group of its own.

Both versions of Linux's interface are known: v1 (a hierarchy for each controller) and v2 (one for
all). A machine may have both mounted; the memory controller then sits in only one of them.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType

from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB

# The shell enters the group and then becomes the command, so that not a page of it is counted
# elsewhere. A child's first code in Python would need preexec_fn, which is unsafe beside threads.
_ENTER = 'echo $$ > "$0" && exec "$@"'
_names = count()


@dataclass(frozen=True)
class Hierarchy:
    """Where the memory controller lives.

    Attributes:
        version: 1 or 2.
        mount: where the hierarchy is mounted.
        own: this process's group, a folder at or below `mount`.
    """

    version: int
    mount: Path
    own: Path

    @property
    def parent(self) -> Path:
        """Where a new group goes: below this process's own, so that its limits hold too.

        In v2 a group with processes in it (but the root) cannot hand controllers to groups below
        it, and ours has this process in it: there the new group becomes its sibling.
        """
        return self.own if self.version == 1 or self.own == self.mount else self.own.parent


def find_hierarchy(mountinfo: str, own_groups: str) -> Hierarchy | None:
    """Reads /proc/self/mountinfo and /proc/self/cgroup (both as text); None without either kind."""
    paths = dict(line.split(":", 2)[1:] for line in own_groups.splitlines())
    v1_path = next((p for names, p in paths.items() if "memory" in names.split(",")), None)
    # v2 is on the line without names. It counts only where no v1 hierarchy has the controller.
    version, path = (1, v1_path) if v1_path is not None else (2, paths.get(""))
    if path is None:
        return None
    for line in mountinfo.splitlines():
        left, right = line.split(" - ", 1)
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        v1_memory = kind == "cgroup" and "memory" in options.split(",")
        if (v1_memory if version == 1 else kind == "cgroup2") and Path(path).is_relative_to(root):
            return Hierarchy(version, Path(point), Path(point) / Path(path).relative_to(root))
    return None


class MemoryLimit:
    """A control group with a memory limit; exists while the `with` block runs.

    Attributes:
        limit: bytes.
        folder: the group.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._hierarchy = _hierarchy()
        name = f"routeahead-{os.getpid()}-{next(_names)}"
        self.folder = self._hierarchy.parent / name

    def __enter__(self) -> MemoryLimit:
        """
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
        """Swap would let the process have more than its limit: it gets none."""
        try:
            if self._hierarchy.version == 1:
                (self.folder / "memory.limit_in_bytes").write_text(str(self.limit))
                # Counts memory and swap together; absent where the kernel does not count swap.
                self._write_if_there("memory.memsw.limit_in_bytes", self.limit)
            else:
                (self.folder / "memory.max").write_text(str(self.limit))
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
        """The most that was used so far, page cache included; None on kernels without the count."""
        v1 = self._hierarchy.version == 1
        file = self.folder / ("memory.max_usage_in_bytes" if v1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def kills(self) -> int:
        """Processes that the kernel killed for the limit."""
        v1 = self._hierarchy.version == 1
        text = (self.folder / ("memory.oom_control" if v1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))


def _hierarchy() -> Hierarchy:
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text()
        found = find_hierarchy(mountinfo, Path("/proc/self/cgroup").read_text())
    except OSError:
        found = None
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
