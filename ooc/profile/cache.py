# SPDX-License-Identifier: Apache-2.0
"""Profiles kept in the user's cache folder, one a machine, disk and device.

Another machine, processor, number of cores, GPU, filesystem or version of this program has a profile of its own, so a
home folder shared by several machines does no harm. What is there but damaged counts as not there.
"""

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path

import torch

from ooc.errors import HardwareError
from ooc.memory import cache_folder, mount_of, processor_name
from ooc.plan import UNMEASURED, UNMEASURED_DEVICE, Hardware
from ooc.profile.profile import Profile
from ooc.storage.array import replace_file
from ooc.version import __version__

_MACHINE_ID = Path("/etc/machine-id")


def cached(folder: Path, *, device: str = "cpu") -> Profile | None:
    """The profile of this machine with the disk of ``folder``; None where there is none to be had."""
    path = location(folder, device=device)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Profile.from_dict(data, where=str(path))
    except (OSError, ValueError, HardwareError):
        return None


def known_hardware(folder: Path, *, device: str = "cpu") -> Hardware:
    """This machine as it has been measured with the disk of ``folder``; estimates where nobody has."""
    profile = cached(folder, device=device)
    if profile is not None:
        return profile.hardware
    return UNMEASURED if device == "cpu" else UNMEASURED_DEVICE


def keep(profile: Profile, folder: Path, *, device: str = "cpu") -> Path:
    """Write ``profile``, whole or not at all → where it is. OSError where the cache folder cannot be written."""
    path = location(folder, device=device)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": _identity(folder, device), **profile.as_dict()}, indent=2, allow_nan=False)
    replace_file(path, (text + "\n").encode())
    return path


def location(folder: Path, *, device: str = "cpu") -> Path:
    """The file of such a profile, whether it is there or not."""
    text = json.dumps(_identity(folder, device), sort_keys=True)
    return cache_folder() / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _identity(folder: Path, device: str) -> dict[str, str | int]:
    """What a profile holds for."""
    return {
        "host": _host(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "device": _device_name(device),
        "disk": "{} {} on {}".format(*mount_of(folder)),
        "version": __version__,
    }


def _host() -> str:
    """The system's name, with its id where it has one; hashed, as the id is not to be handed on."""
    number = ""
    with contextlib.suppress(OSError):
        number = _MACHINE_ID.read_text(encoding="ascii").strip()
    return hashlib.sha256(f"{platform.node()} {number}".encode()).hexdigest()[:16]


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device
