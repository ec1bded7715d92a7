# SPDX-License-Identifier: Apache-2.0
"""What one forward and backward pass of a module takes of memory at most, found without taking it.

The module runs on torch's meta device, whose tensors have sizes and no content, and every storage that an operator
makes counts until nobody holds it.
"""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up storages as operators make them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes: int = 0
        self._bytes: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        made = operator(*arguments, **(named or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, nbytes = storage._cdata, storage.nbytes()
        if number in self._known:
            return
        self._known.add(number)
        self._bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._release, number, nbytes).atexit = False

    def _release(self, number: int, nbytes: int) -> None:
        self._known.discard(number)
        self._bytes -= nbytes


def step_bytes(model: nn.Module, outputs: Callable[[nn.Module], Tensor]) -> int:
    """Bytes of all that is made while ``outputs``, called with a copy of the ``model`` on the meta device, computes its
    outputs there, and while these are differentiated, gradients among them."""
    shadow = copy.deepcopy(model).to("meta")
    # What is picked by a mask is as much as can be.
    assumed = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with assumed, _Meter() as meter:
        made = outputs(shadow)
        torch.autograd.backward(made, torch.empty_like(made))
    peak_bytes: int = meter.peak_bytes
    return peak_bytes
