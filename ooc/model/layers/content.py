# SPDX-License-Identifier: Apache-2.0
"""What tells layers that are made alike: a digest of what they are made of, but for the values of their weights."""

import pickle
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

_FEW = 8
"""Numbers of a parameter that a forward may go another way by, as by those that are all alike."""


class _Hashed:
    """A file that keeps nothing but the digest of what is written to it."""

    def __init__(self) -> None:
        self.sha = sha256()

    def write(self, content: Any) -> int:
        self.sha.update(content)
        return memoryview(content).nbytes


class Content(pickle.Pickler):
    """Of objects: of tensors the numbers, not where these lie; of weights the shape, since what is found out about a
    layer must be true of others, too; classes and functions by their names."""

    def reducer_override(self, one: Any) -> Any:
        if type(one).__module__ == "torch_geometric.inspector":  # it knows of a class, and more from call to call
            return tuple, ((one._cls,),)
        if not isinstance(one, Tensor):
            return NotImplemented
        kept = type(one).__name__, one.dtype, one.requires_grad, tuple(one.shape), str(one.device)
        numbers = one.detach().cpu().contiguous().view(-1)
        is_weights = isinstance(one, nn.Parameter) and len(numbers) > _FEW and bool((numbers != numbers[0]).any())
        return tuple, ((*kept, None if is_weights else sha256(numbers.view(torch.uint8).numpy().data).digest()),)


def digest(*objects: Any, pickler: type[Content] = Content) -> bytes | None:
    """The same for objects that are made alike; None where that cannot be told: of nameless classes and functions, and
    of whatever does not let itself be pickled."""
    hashed = _Hashed()
    try:
        pickler(hashed).dump(objects)
    except Exception:  # of the user's classes
        return None
    return hashed.sha.digest()
