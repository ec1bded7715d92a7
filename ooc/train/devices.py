# SPDX-License-Identifier: Apache-2.0
"""Which device computes, and the machine as the planner is to see it.

``None`` stands for the CPU throughout.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

from ooc.errors import OptionError
from ooc.plan import Hardware
from ooc.prefetch.cuda import Cuda
from ooc.prefetch.device import Device
from ooc.train.profiling import known_hardware

CPU = torch.device("cpu")
NAMES = ("auto", "cpu", "cuda")


def find_device(name: str | Device) -> Device | None:
    """The device of that name; ``auto`` is the CPU, ``cuda`` torch's current GPU. OptionError for one that cannot be
    used. A device is itself."""
    if isinstance(name, Device):
        return name
    if name not in NAMES:
        raise OptionError(f"device {name!r} is not one of {', '.join(NAMES)}")
    if name != "cuda":
        return None
    if not torch.cuda.is_available():
        raise OptionError("device cuda is not available on this machine; use device='cpu'")
    if find_spec("triton") is None:
        raise OptionError("device cuda sums neighbours by triton, which is not installed; pip install triton")
    return Cuda(torch.cuda.current_device())  # kernels of Triton are launched there, wherever their tensors are


def place_of(device: Device | None) -> torch.device:
    """Where its tensors are."""
    return CPU if device is None else device.place


def hardware_for(device: Device | None, folder: Path) -> Hardware:
    """This machine as it has been measured with the disk of ``folder``; estimates where nobody has."""
    return known_hardware(folder, device=place_of(device).type)


def check_hardware(hardware: Hardware, device: Device | None) -> None:
    """OptionError for a description of another kind of machine."""
    if hardware.has_device_memory and device is None:
        raise OptionError(f"hardware {hardware.name} has a device with memory of its own, and the CPU is to compute")
    if device is not None and not hardware.has_device_memory:
        raise OptionError(f"hardware {hardware.name} has no wire to a device, and {device.name} is to compute")
