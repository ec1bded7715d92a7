# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes for other processes; tensors of a device in them arrive on the receiver's device."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def packed(value: Any) -> Tensor:
    """Return the object as bytes, uint8."""
    written = io.BytesIO()
    _Pickler(written).dump(value)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def unpacked(found: Tensor, place: torch.device) -> Any:
    """Return the object, with tensors of a device on ``place``."""
    return _Unpickler(io.BytesIO(found.numpy().tobytes()), place).load()


class _Pickler(pickle.Pickler):
    """Pickles tensors of a device by their copies on the host, marked."""

    def persistent_id(self, thing: Any) -> Any:
        """Return the mark, or None for anything that is not on a device."""
        return thing.cpu() if isinstance(thing, Tensor) and thing.device.type != "cpu" else None


class _Unpickler(pickle.Unpickler):
    """Puts marked tensors on the device ``place``."""

    def __init__(self, file: io.BytesIO, place: torch.device) -> None:
        super().__init__(file)
        self._place = place

    def persistent_load(self, found: Any) -> Any:
        """Return a marked tensor."""
        return found.to(self._place)
