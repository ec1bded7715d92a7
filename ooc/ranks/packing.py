# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes that go to other processes; tensors of a device in them come to the device of who receives them."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def packed(value: Any) -> Tensor:
    """Its bytes, uint8."""
    written = io.BytesIO()
    _Pickler(written).dump(value)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def unpacked(found: Tensor, place: torch.device) -> Any:
    """The value again, its tensors of a device on ``place``."""
    return _Unpickler(io.BytesIO(found.numpy().tobytes()), place).load()


class _Pickler(pickle.Pickler):
    """Tensors of a device by what they are on the host, marked."""

    def persistent_id(self, thing: Any) -> Any:
        """The mark; None: of no device."""
        return thing.cpu() if isinstance(thing, Tensor) and thing.device.type != "cpu" else None


class _Unpickler(pickle.Unpickler):
    """Those marked go to the device ``place``."""

    def __init__(self, file: io.BytesIO, place: torch.device) -> None:
        super().__init__(file)
        self._place = place

    def persistent_load(self, found: Any) -> Any:
        """A tensor that was marked."""
        return found.to(self._place)
