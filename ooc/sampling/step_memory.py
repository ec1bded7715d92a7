# SPDX-License-Identifier: Apache-2.0
"""What one forward and backward pass of a module takes of memory at most, found without taking it: on torch's meta
device, whose tensors have sizes and no content.
"""

import copy
from collections.abc import Callable

import torch
import torch.fx.experimental._config
from torch import Tensor, nn

from ooc.model.layers.conformance import Watch


def step_bytes(model: nn.Module, outputs: Callable[[nn.Module], Tensor]) -> int:
    """Bytes of all that is made while ``outputs``, called with a copy of the ``model`` on the meta device, computes its
    outputs there, and while these are differentiated, gradients among them."""
    shadow = copy.deepcopy(model).to("meta")

    def step() -> None:
        made = outputs(shadow)
        torch.autograd.backward(made, torch.empty_like(made))

    # What is picked by a mask is as much as can be.
    with torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        return Watch.of(step).peak_bytes
