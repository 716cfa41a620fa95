"""Linux control groups: where this process is accounted, and what its limits leave.

Both versions of the interface are known: v1 (a hierarchy for each controller) and v2 (one for all).
A machine may have both mounted; a controller then sits in only one of them. Groups are
nested, and the limit of each group holds for everything below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_V1_UNLIMITED = 1 << 60  # v1 shows a group without a limit as a number near 2^63


@dataclass(frozen=True)
class Files:
    """Names of a memory controller's files, and of the page cache in `memory.stat`.

    Attributes:
        limits: what exceeds the first is killed; what exceeds the second is slowed down until it
            does not.
        peak: absent on kernels that do not count it.
        events: has a line `oom_kill N`.
        cache: keys of the pages that the kernel can give up. A tmpfs is page cache too, but has
            nowhere to go, and stands on other lists.
    """

    limits: tuple[str, ...]
    usage: str
    peak: str
    events: str
    cache: tuple[str, str]

    @property
    def limit(self) -> str:
        return self.limits[0]


V1 = Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    ("total_active_file", "total_inactive_file"),
)
V2 = Files(
    ("memory.max", "memory.high"),
    "memory.current",
    "memory.peak",
    "memory.events",
    ("active_file", "inactive_file"),
)


@dataclass(frozen=True)
class Hierarchy:
    """The hierarchy of groups that has a controller.

    Attributes:
        version: 1 or 2.
        mount: where the hierarchy is mounted.
        own: this process's group, a folder at or below `mount`.
    """

    version: int
    mount: Path
    own: Path

    @property
    def files(self) -> Files:
        return V1 if self.version == 1 else V2

    @property
    def parent(self) -> Path:
        """Where a new group goes: below this process's own, so that its limits hold too.

        In v2 a group with processes in it (but the root) cannot hand controllers to groups below
        it, and ours has this process in it: there the new group becomes its sibling.
        """
        return self.own if self.version == 1 or self.own == self.mount else self.own.parent

    def free_bytes(self) -> int | None:
        """Bytes left under the tightest limit of this process's group and those above it.

        The page cache counts as free: the kernel gives it up before it kills. None if no group has
        a limit.
        """
        left = (_left(group, self.files) for group in self._up())
        return min((free for free in left if free is not None), default=None)

    def cores(self) -> float | None:
        """CPU time that the tightest quota of this process's group and those above it allows, in
        cores. None if no group has one."""
        quota = _quota_v1 if self.version == 1 else _quota_v2
        quotas = (quota(group) for group in self._up())
        return min((cores for cores in quotas if cores is not None), default=None)

    def _up(self) -> list[Path]:
        """This process's group and those above it."""
        above = [group for group in self.own.parents if group.is_relative_to(self.mount)]
        return [self.own, *above]


def own_hierarchy(controller: str = "memory") -> Hierarchy | None:
    """This process's; None if it is in no group with that controller."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text()
        return find_hierarchy(mountinfo, Path("/proc/self/cgroup").read_text(), controller)
    except OSError:  # no Linux
        return None


def cpu_quota() -> float | None:
    """Cores' worth of CPU time that this process's groups may use; None if there is no quota."""
    hierarchy = own_hierarchy("cpu")
    return hierarchy.cores() if hierarchy else None


def find_hierarchy(mountinfo: str, own_groups: str, controller: str = "memory") -> Hierarchy | None:
    """Reads /proc/self/mountinfo and /proc/self/cgroup, both as text; None if neither has it."""
    paths = dict(line.split(":", 2)[1:] for line in own_groups.splitlines())
    v1_path = next((p for names, p in paths.items() if controller in names.split(",")), None)
    # v2 is on the line without names. It counts only if no v1 hierarchy has the controller.
    version, path = (1, v1_path) if v1_path is not None else (2, paths.get(""))
    if path is None:
        return None
    for line in mountinfo.splitlines():
        left, right = line.split(" - ", 1)
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        v1_mount = kind == "cgroup" and controller in options.split(",")
        if (v1_mount if version == 1 else kind == "cgroup2") and Path(path).is_relative_to(root):
            return Hierarchy(version, Path(point), Path(point) / Path(path).relative_to(root))
    return None


def read_counts(file: Path) -> Mapping[str, int]:
    """A file of lines `name number`, such as memory.stat."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number in lines}


def _left(group: Path, files: Files) -> int | None:
    """Bytes left under the group's own limits; None if it has none, or no memory controller."""
    try:
        limits = [_limit(group / name) for name in files.limits]
        limit = min((one for one in limits if one is not None), default=None)
        if limit is None:
            return None
        usage = int((group / files.usage).read_text())
        counts = read_counts(group / "memory.stat")
        cache = sum(counts.get(key, 0) for key in files.cache)
    except (OSError, ValueError):
        return None
    return max(0, limit - usage + cache)


def _limit(file: Path) -> int | None:
    """What the file says; None if that is no limit, or the kernel has no such file."""
    if not file.exists():
        return None
    text = file.read_text().strip()
    return None if text == "max" or int(text) > _V1_UNLIMITED else int(text)


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
