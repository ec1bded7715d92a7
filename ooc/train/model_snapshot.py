# SPDX-License-Identifier: Apache-2.0
"""What a trainer has taken from its model, its loss and PyG's data when it was made, and whether it still holds.

Weights, and buffers that are written into, are looked up whenever they are used. Which modules there are, which
parameters are trained, rates of dropout, slopes and the like, of a module, of its class, in a list, dictionary or
object of these, or of what is around a function (globals, what encloses it), decided what is planned; changed later,
they would count for nothing. Nor would hooks, or another ``forward``, that are set on a module later, nor tensors that
are neither parameters nor buffers, or buffers of whole numbers, by which there may be as many steps. Of data a store
has been made, and of torch's losses what divides them.

What a training is made of is described as well, for several processes to compare; weights of the model are left out,
of which all take the first's.
"""

import hashlib
import platform
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from dis import get_instructions
from enum import Enum
from functools import cache, partial
from inspect import isfunction, unwrap
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref
from zlib import crc32

import google_crc32c
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ooc.errors import ModelError, TrainingError
from ooc.model.lowering.network import has_hooks, hooks_of
from ooc.ranks import Ranks
from ooc.version import __version__

PLAIN = (bool, int, float, str, type(None))
_OF_ALL = vars(nn.Module()).keys()
"""What every module has: its mode, and what is looked at by itself."""
_CALLED = ("forward", "propagate", "message", "aggregate", "update", "edge_updater", "edge_update")
"""Of a module's functions, those that it or PyG calls by name."""
NOBODYS = ("torch", "builtins", "numpy")
"""Packages that nobody changes meanwhile."""
_OF_DATA = (
    *("x", "y", "edge_index", "edge_weight", "edge_attr", "edge_type", "adj_t"),
    *(f"{split}_{form}" for split in ("train", "val", "valid", "test") for form in ("mask", "idx", "y")),
)
"""What a conversion reads of data."""
_COMPARED = (*PLAIN, complex, bytes, range, slice, Enum, torch.dtype, torch.device, np.ndarray)
"""What is equal or not, whoever it belongs to."""
_CONTAINERS = (list, tuple, dict, deque, set, frozenset)
_MODULES_AND_FUNCTIONS = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial)
_BY_ANY_NAME = frozenset(
    ("getattr", "vars", "__dict__", "attrgetter", "eval", "exec", "__getattribute__", "__getattr__")
)
"""What reads attributes whose names are nowhere in the code."""
_EMPTY = CellType()
_READ_BYTES = 1 << 26
"""Of a tensor that is compared by what is in it: 0.05 s. A larger one is by which it is, and how often written into."""
_CHANGED = (
    "has changed since the trainer was made, which it does not see: make another Trainer with the model and its "
    "optimizer"
)
_CHANGES = "changes whenever the model runs, which is once for all epochs or once for every tile: leave it as it is"


class ModelSnapshot:
    """Of ``model``, as it is now; ``around``: with what is around its functions."""

    def __init__(self, model: nn.Module, *, around: bool = True) -> None:
        self._model, self._with_around = model, around
        self._constants, self._frozen = self._now(), _frozen(model)

    def _now(self) -> dict[str, object]:
        found = dict(constants(self._model, around=self._with_around))
        if self._with_around:
            found |= {f"the value of {name}": [buffer] for name, buffer in _taken_as_numbers(self._model)}
        return {name: [*map(_content, one)] if isinstance(one, list) else one for name, one in found.items()}

    def check(self, *, tried: bool = False) -> None:
        """Raise ModelError naming what is no longer as it was; ``tried``: since the model was tried and taken apart."""
        there = self._now()
        for name in [*self._constants, *there]:
            before, now = self._constants.get(name), there.get(name)
            is_equal = isinstance(before, (*PLAIN, list)) and isinstance(now, (*PLAIN, list)) and before == now
            if before is not now and not is_equal:
                raise ModelError(f"{name} of the model {_CHANGES if tried else _CHANGED}")
        if self._model.training and (changed := sorted(self._frozen ^ _frozen(self._model))):
            raise ModelError(f"{changed[0]}.training of the model {_CHANGED}")


def _frozen(model: nn.Module) -> set[str]:
    """The parts of a model in training mode that are not in it; all of it may be put in evaluation mode meanwhile."""
    return {name for name, part in model.named_modules() if model.training and not part.training}


@dataclass(frozen=True, slots=True)
class _Written:
    """Which tensor it is, and how often it was written into."""

    which: int
    times: int
    held: Tensor = field(compare=False)


def _content(one: object) -> object:
    """What is in a tensor or array, to be compared; anything else as it is."""
    if isinstance(one, Tensor):
        if one.is_meta or one.layout is not torch.strided or one.nbytes > _READ_BYTES:
            return _Written(id(one), 0 if one.is_inference() else one._version, one)
        one = one.detach().as_subclass(Tensor).cpu().contiguous()
        return str(one.dtype), tuple(one.shape), crc32(one.reshape(-1).view(torch.uint8).numpy().data)
    return (str(one.dtype), one.shape, crc32(one.tobytes())) if isinstance(one, np.ndarray) else one


class LossSnapshot:
    """Of ``loss`` as it is now: a module of torch's, which is computed by what it was when a trainer was made; of one
    that ``is_own``, which is called as it is, what says whether it is a mean: truths and words."""

    def __init__(self, loss: object, *, is_own: bool) -> None:
        self._loss, self._is_own = loss, is_own
        self._parts = self._now()

    def _now(self) -> dict[str, object]:
        modules = self._loss.named_modules() if isinstance(self._loss, nn.Module) else [("", self._loss)]
        parts = [
            (f"{path}.{name}".lstrip("."), one)
            for path, part in modules
            for name, one in [*getattr(part, "__dict__", {}).items(), *getattr(part, "_buffers", {}).items()]
            if name not in _OF_ALL
        ]
        parts += [found for function in _functions_in(self._loss) for found in surroundings(function)]
        return {name: _content(one) for name, one in parts if not self._is_own or isinstance(one, (bool, str))}

    def check(self) -> None:
        """Raise ModelError naming what is no longer as it was."""
        now = self._now()
        for name in now.keys() | self._parts.keys():
            if now.get(name) != self._parts.get(name):
                raise ModelError(f"{name} of the loss {_CHANGED}")


class DataSnapshot:
    """Of PyG's ``data``, as it is now, with what of it is ``beside`` x; of anything else nothing. It keeps none of
    it."""

    def __init__(self, data: Any, beside: Sequence[str] = ()) -> None:
        self._data, self._names = ref(data) if hasattr(data, "stores") else lambda: None, (*_OF_DATA, *beside)
        self._tensors = {name: (ref(one), one._version) for name, one in _tensors_of(data, self._names)}

    def check(self) -> None:
        """Raise TrainingError naming a tensor that is another one, or was written into; one that is gone may be."""
        for name, now in _tensors_of(self._data(), self._names):
            tensor, version = self._tensors.get(name, (ref(now), now._version))
            if tensor() is not now or now._version != version:
                raise TrainingError(f"{name} of the data {_CHANGED}, of the data as it is now")


def _tensors_of(data: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for part in getattr(data, "stores", ()):
        for name in names:
            if isinstance(one := getattr(part, name, None), Tensor) and not one.is_inference():
                yield name if part._key is None else f"{name} of {part._key!r}", one


def constants(model: nn.Module, *, around: bool = True) -> Iterator[tuple[str, object]]:
    """What a model is made of, by name: modules, functions, values, parameters and buffers, and in lists what is in
    others; ``around``: with functions that these call, and what is around all of them."""
    attributes = {module: [*_attributes_of(module)] for module in model.modules()}
    every = (value for own in attributes.values() for _, value in own)
    functions = dict.fromkeys(one for value in every for one in _functions_in(value))
    called: dict[FunctionType, str] = {}
    found: list[tuple[str, object]] = []
    while functions:
        function, _ = functions.popitem()
        called[function] = f"{function.__module__}.{function.__qualname__}"
        for name, value in surroundings(function):
            functions |= dict.fromkeys(one for one in _functions_in(value) if one not in called)
            found += [(name, value)] if around else []
    names = set[str]().union(*map(_names_in, called))
    read = set[str]().union(*(_named_in(function.__code__, "LOAD_") for function in called))
    kept = cache(lambda: {name for kind in {type(module) for module in model.modules()} for name in _put_by(kind)})
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield path or type(model).__name__, module
        takes_all = _may_be_read_otherwise(module, read)
        for name, value in attributes[module]:
            if not (takes_all or name in read or callable(value)):
                continue
            if isinstance(value, PLAIN) or callable(value):
                yield prefix + name, value
            if not (isinstance(value, PLAIN) or (isinstance(value, Tensor) and name in kept())):
                found.append((prefix + name, value))
        for kind in hooks_of(module):
            yield prefix + kind, True
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
                yield f"{prefix}{name}.requires_grad", parameter.requires_grad
                yield f"{prefix}{name}.dtype", str(parameter.dtype)
                yield f"{prefix}{name}.hooks", has_hooks(parameter)
        for name, buffer in module._buffers.items():
            yield prefix + name, buffer
    if around:
        yield from ((name, function) for function, name in called.items())
    own = {*map(_place_of, (*model.parameters(), *model.buffers()))}
    opened: dict[int, object] = {}
    for name, value in found:
        if not _is_own(value):
            leaves = [one for one in _leaves(value, names, own) if around or isinstance(one, PLAIN)]
            yield from [(name, leaves)] if leaves else []
        elif id(value) not in opened:
            opened[id(value)] = value
            found += [(f"{name}.{part}", one) for part, one in _parts_of(value, names)]


def _leaves(
    value: object, names: set[str], own: Collection[object], depth: int = 8, within: tuple[int, ...] = ()
) -> Iterator[object]:
    """What counts in a value, or in the values that it holds: tensors too, but for those that share memory with a
    model's ``own``, or have a gradient; of somebody's own object the parts that are among ``names``. ``within``: the
    lists and dictionaries that it is in, since one may hold itself."""
    if id(value) in within:
        return
    if isinstance(value, _COMPARED):
        yield value
    elif isinstance(value, Tensor):
        if not value.requires_grad and _place_of(value) not in own:
            yield value
    elif isinstance(value, (set, frozenset)):
        yield frozenset(one for one in value if isinstance(one, PLAIN))
    elif isinstance(value, _CONTAINERS):
        for one in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _leaves(one, names, own, depth, (*within, id(value)))
    elif depth and _is_own(value):
        for _, one in _parts_of(value, names):
            yield from _leaves(one, names, own, depth - 1, within)


def _put_by(kind: type[nn.Module]) -> set[str]:
    """The attributes that its forward sets, or what that may call of the class."""
    found, waiting, seen = set[str](), [*_CALLED], set[str]()
    while waiting:
        seen.add(name := waiting.pop())
        function = unwrap(part) if isfunction(part := getattr(kind, name, None)) else None
        if isfunction(function):
            found |= _named_in(function.__code__, "STORE_ATTR")
            waiting += [one for one in function.__code__.co_names if one not in seen]
    return found


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Those of its class, as far as that is somebody's own, and of the module itself."""
    own_kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(NOBODYS)]
    for one in (*own_kinds[::-1], module):
        yield from ((name, value) for name, value in vars(one).items() if name not in _OF_ALL)


def _may_be_read_otherwise(module: nn.Module, read: Collection[str]) -> bool:
    """Whether attributes may be read by others than functions that name them: by PyG's, or by any name."""
    bases = {kind for kind in type(module).__mro__ if kind.__module__.startswith(NOBODYS)} - {nn.Module, object}
    return bool(bases) or not _BY_ANY_NAME.isdisjoint(read)


def _place_of(tensor: Tensor) -> object:
    """What tensors have in common that share memory."""
    return id(tensor) if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def _is_own(value: object) -> bool:
    """Whether it is an object of a class that is somebody's own, which may be changed meanwhile, and no module."""
    is_other = isinstance(value, (*_COMPARED, *_CONTAINERS, *_MODULES_AND_FUNCTIONS))
    return not is_other and not type(value).__module__.startswith(NOBODYS)


def _parts_of(value: object, names: set[str]) -> list[tuple[str, object]]:
    """Those of an object that are called so."""
    parts = {*getattr(value, "__dict__", ())}.union(*(getattr(kind, "__slots__", ()) for kind in type(value).__mro__))
    return [(name, getattr(value, name, None)) for name in sorted(names & parts)]


def _functions_in(value: object, depth: int = 2) -> list[FunctionType]:
    """The functions of somebody's own that it is, wraps or holds."""
    if isinstance(value, _CONTAINERS):
        held = value.values() if isinstance(value, dict) else value
        return [function for one in held for function in _functions_in(one, depth - 1)] if depth else []
    if _is_own(value) and not isinstance(value, (staticmethod, classmethod, property)):
        value = type(value).__call__ if callable(value) else None
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, (property, partial)):
        value = value.fget if isinstance(value, property) else value.func
    if not isinstance(value, FunctionType):
        return []
    module = value.__module__ or ""
    is_pythons = module.partition(".")[0] in sys.stdlib_module_names  # which have caches, as of regular expressions
    return [] if is_pythons or module.startswith(NOBODYS) else [value]


def _names_in(function: FunctionType) -> set[str]:
    """Globals and attributes that it names."""
    return set[str]().union(*(code.co_names for code in _codes_of(function.__code__)))


@cache
def _named_in(code: CodeType, kind: str) -> set[str]:
    """The names, and constant words, of its instructions of a kind: ``LOAD_GLOBAL``, or ``LOAD_`` of all that load."""
    named = (one for part in _codes_of(code) for one in get_instructions(part))
    return {one.argval for one in named if one.opname.startswith(kind) and isinstance(one.argval, str)}


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """It, and those of functions that are made in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_of(one)


def surroundings(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What a function finds by a name outside of it: globals, parts of those that it names, what encloses it, and
    defaults of its arguments."""
    names = _names_in(function)
    for name in sorted(_named_in(function.__code__, "LOAD_GLOBAL") & function.__globals__.keys()):
        value, place = function.__globals__[name], f"{function.__module__}.{name}"
        yield place, value
        owner = value if isinstance(value, type) else type(value)
        if not (value.__name__ if isinstance(value, ModuleType) else owner.__module__).startswith(NOBODYS):
            parts = getattr(value, "__dict__", {})
            yield from ((f"{place}.{part}", parts[part]) for part in sorted(names & parts.keys()))
    place = f"{function.__module__}.{function.__qualname__}"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != _EMPTY:
            yield f"{name} around {place}", cell.cell_contents
    yield f"a default of {place}", (function.__defaults__, function.__kwdefaults__)


def _taken_as_numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from torch_geometric.nn import GINConv, GINEConv  # stores are converted where PyG is missing, too

    for path, module in model.named_modules():
        if isinstance(module, (GINConv, GINEConv)) and not isinstance(module.eps, nn.Parameter):
            yield f"{path}.eps".lstrip("."), module.eps
        if not type(module).__module__.startswith(NOBODYS):
            for name, buffer in module.named_buffers(recurse=False):
                if not (buffer.is_floating_point() or is_lazy(buffer)):
                    yield f"{path}.{name}".lstrip("."), buffer


# ---- what a training is made of, in words and checksums, for processes to compare that train together: each has model,
# optimizer and options of its own script or files


_DEPTH = 4
"""So far parts of parts are looked at, where somebody's own objects hold each other."""
_DESCRIBED = (*PLAIN, Tensor, np.ndarray, list, tuple, dict, FunctionType)
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
        shape = str(value.dtype), None if is_lazy(value) else tuple(value.shape)
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
        named = [(place, inner(one)) for place, one in surroundings(value) if isinstance(one, _DESCRIBED)]
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
