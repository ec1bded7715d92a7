# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about a process's resident memory (Linux)."""

from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def anonymous_bytes() -> int:
    """Resident memory of this process now that is no file's."""
    return _status_bytes("RssAnon")


def peak_resident_bytes() -> int:
    """The highest resident memory of this process since it began or since ``reset_peak``."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Let the peak start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
