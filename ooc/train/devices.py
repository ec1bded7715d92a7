# SPDX-License-Identifier: Apache-2.0
"""Which device computes, the machine as the planner is to see it, and what a device with memory of its own cannot run.

``None`` stands for the CPU throughout.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

from ooc.errors import ModelError, OptionError
from ooc.plan import Hardware
from ooc.prefetch.cuda import Cuda
from ooc.prefetch.device import Device
from ooc.train.lowering import Network
from ooc.train.lowering.edge_functions import DotAttention, EdgeSum, Gatv2Attention
from ooc.train.lowering.general import General
from ooc.train.lowering.network import values_of
from ooc.train.lowering.per_edge import EdgeAggregate, GatAttention, Maximum
from ooc.train.profiling import known_hardware

CPU = torch.device("cpu")
NAMES = ("auto", "cpu", "cuda")


def find_device(name: str) -> Device | None:
    """The device of that name; ``auto`` is the CPU. OptionError for one that cannot be used."""
    if name not in NAMES:
        raise OptionError(f"device {name!r} is not one of {', '.join(NAMES)}")
    if name != "cuda":
        return None
    if not torch.cuda.is_available():
        raise OptionError("device cuda is not available on this machine; use --device cpu")
    if find_spec("triton") is None:
        raise OptionError("device cuda sums neighbours by triton, which is not installed; pip install triton")
    return Cuda()


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


def check_computable(network: Network, device: Device | None) -> None:
    """ModelError for what is only computed on the CPU so far, by name."""
    if device is None:
        return
    for value in (*values_of(network.training), *values_of(network.evaluation)):
        if isinstance(value, EdgeAggregate) and not isinstance(value, (GatAttention, Maximum)):
            raise ModelError(
                f"{_called(value)} is computed on the CPU only, not on {device.name} yet; use --device cpu, or a model "
                "that sums over neighbours or takes their maximum (GCN, SAGE, GIN and their like) or GATConv"
            )


def _called(value: EdgeAggregate) -> str:
    match value:
        case General():
            return f"{type(value.layer.module).__name__}, which runs as it is,"
        case EdgeSum():
            return "a sum of functions of edges (GINEConv)"
        case Gatv2Attention():
            return "GATv2Conv's attention"
        case DotAttention():
            return "TransformerConv's attention"
        case _:
            return "GATConv's attention with features of edges"
