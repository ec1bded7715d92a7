# SPDX-License-Identifier: Apache-2.0
"""What the system says of the machine at hand: its processor, where folders lie, and where programs keep things."""

import os
from pathlib import Path

import psutil


def processor_name() -> str:
    """The CPU's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "this machine")


def mount_of(path: Path) -> tuple[str, str, str]:
    """Type and source of the filesystem that holds ``path``, whether that exists or not, and where it is mounted."""
    above = (path.resolve(), *path.resolve().parents)
    mounted = [one for one in psutil.disk_partitions(all=True) if Path(one.mountpoint) in above]
    found = max(reversed(mounted), key=lambda one: len(one.mountpoint), default=None)
    return ("the filesystem", "unknown", "/") if found is None else (found.fstype, found.device, found.mountpoint)


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that holds ``path``, as the system calls it: ext4, xfs, tmpfs, nfs4, …"""
    return mount_of(path)[0]


def cache_folder() -> Path:
    """The user's, for what ooc may find out anew."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "ooc"
