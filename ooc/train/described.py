# SPDX-License-Identifier: Apache-2.0
"""What a training is made of, in words and checksums, for processes to compare that train together: each has model,
optimizer and options of its own script or files.

Weights of the model are left out, of which all take the first's.
"""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import google_crc32c
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ooc.ranks import Ranks
from ooc.train.model_snapshot import NOBODYS, PLAIN, constants, surroundings
from ooc.version import __version__

_DEPTH = 4
"""So far parts of parts are looked at, where somebody's own objects hold each other."""
_COMPARED = (*PLAIN, Tensor, np.ndarray, list, tuple, dict, FunctionType)
"""Of what a function finds by the name of a global, what is no affair of the process alone."""


def check_software(ranks: Ranks) -> None:
    """OptionError where processes compute with other versions than the first."""
    import torch_geometric

    found = {"ooc": __version__, "torch": torch.__version__, "PyG": torch_geometric.__version__}
    found |= {"numpy": np.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    ranks.check_alike(found, f"the software ({', '.join(map(' '.join, found.items()))})")


def described(model: nn.Module, optimizer: Optimizer | None, given: Mapping[str, Any]) -> dict[str, str]:
    """By name what the parts of ``model`` are, the ``optimizer``, and what else is ``given``; equal in two processes
    where the same was given to both."""
    found: dict[str, Any] = {f"model.{name}": _said(value, weights=True) for name, value in constants(model)}
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        stepped = [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
        found["optimizer"] = type(optimizer).__qualname__, _said(optimizer.state_dict()), stepped
    found |= {name: _said(value) for name, value in given.items()}
    return {name: hashlib.sha256(repr(said).encode()).hexdigest() for name, said in found.items()}


def _said(value: Any, depth: int = _DEPTH, *, weights: bool = False) -> Any:
    """``value`` as what has the same ``repr`` in every process; ``weights``: of tensors not what is in them."""
    if isinstance(value, (*PLAIN, complex, bytes)):
        return value
    if isinstance(value, Tensor):
        shape = str(value.dtype), None if nn.parameter.is_lazy(value) else tuple(value.shape)
        if weights or value.layout is not torch.strided:
            return shape
        return shape, _checksum(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, _checksum(value)
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [_said(one, depth) for one in value.co_consts]
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return _said(value.__func__, depth)
    if isinstance(value, AveragedModel):  # its weights are those of the model as it is first averaged
        return _said([value.avg_fn, value.multi_avg_fn, value.use_buffers, value.n_averaged], depth)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    # Of packages whose versions are compared.
    is_nobodys = isinstance(value, FunctionType) and (value.__module__ or "").startswith(NOBODYS)
    if depth <= 0 or is_nobodys or isinstance(value, (type, Optimizer)):
        return name
    inner = partial(_said, depth=depth - 1)
    if isinstance(value, FunctionType):
        enclosed = [one.cell_contents for one in value.__closure__ or () if one != CellType()]
        named = [(place, inner(one)) for place, one in surroundings(value) if isinstance(one, _COMPARED)]
        return [*(inner(one) for one in (value.__code__, *enclosed)), named]
    if isinstance(value, partial):
        return [inner(one) for one in (value.func, value.args, value.keywords)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(inner(one)) for one in value)
    if isinstance(value, (list, tuple)):
        return [inner(one) for one in value]
    if isinstance(value, Mapping):
        return sorted((str(key), repr(inner(one))) for key, one in value.items())
    if isinstance(value, nn.Module):
        return name, {} if weights else {part: inner(one) for part, one in constants(value) if one is not value}
    parts = {one.name for one in fields(value)} if is_dataclass(value) else getattr(value, "__dict__", {})
    return name, [(part, inner(getattr(value, part))) for part in sorted(parts)]


def _checksum(values: "np.ndarray[Any, Any]") -> int:
    return int(google_crc32c.value(np.ascontiguousarray(values).tobytes()))
