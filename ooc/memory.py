# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take, of the machine's or of its control group's; and other facts about the
machine."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from ooc.errors import OptionError

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def available_memory_bytes() -> int:
    """Return the bytes of RAM free for this process, including caches that the kernel would drop."""
    return max(0, min([int(psutil.virtual_memory().available), *_group_rooms(_CGROUPS, _OWN_GROUPS)]))


def return_freed_memory(nbytes: int, *, trim_bytes: int) -> None:
    """Make glibc return freed blocks of at least ``nbytes`` to the system, and the end of its heap when ``trim_bytes``
    of it are free. This holds for the process; a later call replaces an earlier one."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, nbytes)
        mallopt(trim_threshold, trim_bytes)


HOST_SHARE_OF_FREE = 0.5
DEVICE_SHARE_OF_FREE = 0.9
CPU_DEVICE_SHARE_OF_FREE = 0.25


def default_budgets(device_free_bytes: int | None) -> tuple[int, int]:
    """Return the default budgets of device and host: shares of what is free now.

    ``device_free_bytes``: free bytes on a device with memory of its own; None: the CPU computes, both budgets are of
    the same RAM, and a quarter of it is left to the rest of the machine.
    """
    free = available_memory_bytes()
    of_cpu = CPU_DEVICE_SHARE_OF_FREE * free
    device = of_cpu if device_free_bytes is None else DEVICE_SHARE_OF_FREE * device_free_bytes
    return int(device), int(HOST_SHARE_OF_FREE * free)


def check_memory_alone(gpu_budget: str | float | None, host_budget: str | float | None, *, on_device: bool) -> None:
    """Raise OptionError if one memory is not applicable: on a device with memory of its own, or beside one of the two
    budgets."""
    if on_device:
        raise OptionError("memory is one where the CPU computes; for a GPU give gpu_budget= and host_budget=")
    if gpu_budget is not None or host_budget is not None:
        raise OptionError("memory= is both budgets together; give either it or gpu_budget= and host_budget=")


def divide_memory(memory_bytes: int) -> tuple[int, int]:
    """Return the budgets of device and host from one memory that the CPU computes in: a third and two thirds, as for
    defaults. The planner moves the border if one would be too small."""
    device = int(memory_bytes * CPU_DEVICE_SHARE_OF_FREE / (CPU_DEVICE_SHARE_OF_FREE + HOST_SHARE_OF_FREE))
    return device, memory_bytes - device


def budgets_within(device_bytes: int, host_bytes: int, *, device_free_bytes: int | None) -> tuple[int, int]:
    """Return the two budgets cut to the memory that is there.

    ``device_free_bytes``: free bytes on a device with memory of its own; None: the CPU computes, and both budgets are
    of the same RAM. Then the smaller one is kept as far as it takes at most half, and the other gets the rest.
    """
    free = available_memory_bytes()
    if device_free_bytes is not None:
        return min(device_bytes, device_free_bytes), min(host_bytes, free)
    if device_bytes + host_bytes <= free:
        return device_bytes, host_bytes
    device_kept = min(device_bytes, max(free // 2, free - host_bytes))
    return device_kept, min(host_bytes, free - device_kept)


def _group_rooms(mount: Path, own_groups: Path) -> Iterator[int]:
    """Yield what each control group around this process leaves free, if it has a limit."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            root, limit, usage = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path is the host's and may not exist here; the root then is our group.
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            limit_bytes, usage_bytes = _number(folder / limit), _number(folder / usage)
            if limit_bytes is not None and usage_bytes is not None:
                yield limit_bytes - usage_bytes + _dropped_bytes(folder / "memory.stat")
            folder = folder.parent


def _number(path: Path) -> int | None:
    """Return the number in a control file; None if there is none, or no limit (``max``)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _dropped_bytes(path: Path) -> int:
    """Return the page cache charged to the group, which the kernel drops before it kills."""
    try:
        fields = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


# ---- the machine beside it ------------------------------------------------------------


def processor_name() -> str:
    """Return the CPU's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "this machine")


def mount_of(path: Path) -> tuple[str, str, str]:
    """Return type and source of the filesystem that holds ``path``, existing or not, and where it is mounted."""
    above = ((real := Path(os.path.realpath(path))), *real.parents)  # a loop of links is none yet
    mounted = [one for one in psutil.disk_partitions(all=True) if Path(one.mountpoint) in above]
    found = max(reversed(mounted), key=lambda one: len(one.mountpoint), default=None)
    return ("the filesystem", "unknown", "/") if found is None else (found.fstype, found.device, found.mountpoint)


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that holds ``path``, by the system's name: ext4, xfs, tmpfs, nfs4, …"""
    return mount_of(path)[0]


def cache_folder() -> Path:
    """Return the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "ooc"
