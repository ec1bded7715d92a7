# SPDX-License-Identifier: Apache-2.0
"""Cgroups for a child process: a hard memory limit with the peak the kernel counted, or a slower disk (as root)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


class CgroupUnavailable(Exception):
    """No memory cgroup can be made here; the message says why."""


@dataclass(frozen=True)
class MemoryCgroup:
    """One cgroup with a memory limit."""

    path: Path
    limit_bytes: int
    peak_file: str
    events_file: str
    kind: str

    def enter(self) -> None:
        """Move the calling process in: for a ``preexec_fn``."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def peak_bytes(self) -> int:
        """The most memory charged so far: anonymous memory and page cache, the kernel's share with v2."""
        return int((self.path / self.peak_file).read_text(encoding="ascii"))

    def kills(self) -> int:
        """How many processes the kernel killed here for want of memory."""
        for line in (self.path / self.events_file).read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0


@contextmanager
def memory_cgroup(limit_bytes: int, name: str) -> Iterator[MemoryCgroup]:
    """A new cgroup limited to ``limit_bytes``, removed at the end. Raises CgroupUnavailable."""
    path, kind = _create(f"{name}-{os.getpid()}")
    try:
        if kind == "v1":
            group = MemoryCgroup(path, limit_bytes, "memory.max_usage_in_bytes", "memory.oom_control", kind)
            limits = {"memory.limit_in_bytes": str(limit_bytes)}
        else:
            group = MemoryCgroup(path, limit_bytes, "memory.peak", "memory.events", kind)
            limits = {"memory.max": str(limit_bytes), "memory.swap.max": "0"}
        for file, value in limits.items():
            if file != "memory.swap.max" or (path / file).exists():
                (path / file).write_text(value, encoding="ascii")
        yield group
    except PermissionError as error:
        raise CgroupUnavailable(f"no memory cgroup: {error}") from error
    finally:
        path.rmdir()


@dataclass(frozen=True)
class ThrottledDisk:
    """A cgroup in which the disk is slow."""

    path: Path

    def enter(self) -> None:
        """Move the calling process in: for a ``preexec_fn``."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


@contextmanager
def throttled_disk(folder: Path, bytes_per_s: int, name: str) -> Iterator[ThrottledDisk]:
    """A new cgroup in which the disk of ``folder`` reads, and writes, so much a second. Raises CgroupUnavailable."""
    root = Path("/sys/fs/cgroup/blkio")
    if not (root / "blkio.throttle.read_bps_device").exists():
        raise CgroupUnavailable("no blkio cgroup (v1) with a throttle under /sys/fs/cgroup/blkio")
    device = folder.stat().st_dev
    path = root / f"{name}-{os.getpid()}"
    try:
        path.mkdir()
        for way in ("read", "write"):
            rule = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
            (path / f"blkio.throttle.{way}_bps_device").write_text(rule, encoding="ascii")
        yield ThrottledDisk(path)
    except PermissionError as error:
        raise CgroupUnavailable(f"no blkio cgroup: {error}") from error
    finally:
        if path.exists():
            path.rmdir()


def _create(name: str) -> tuple[Path, str]:
    if (_V1_ROOT / "memory.limit_in_bytes").exists():
        candidates = [(_V1_ROOT / name, "v1")]
    else:
        candidates = [(root / name, "v2") for root in _V2_ROOTS if "memory" in _words(root / "cgroup.subtree_control")]
    for path, kind in candidates:
        try:
            path.mkdir()
        except OSError as error:
            raise CgroupUnavailable(f"no memory cgroup: {error}") from error
        return path, kind
    raise CgroupUnavailable("no memory cgroup: the memory controller is not enabled under /sys/fs/cgroup")


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split() if path.exists() else []
