# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the model, the loss and PyG's data as a trainer took them, to find out whether they were changed since.

A trainer looks up parameters, and buffers that are written into, whenever it uses them. Other things decided the plan,
and a later change of them would have no effect: which modules there are, which parameters are trained, rates of
dropout, slopes and similar values. Such values may be attributes of a module or its class, may be inside a list,
dictionary or object held there, or may be globals and enclosing variables of a function. Hooks and ``forward``
functions that are set on a module later would have no effect either. The same holds for tensors that are neither
parameters nor buffers, and for integer buffers, which may decide how many operations there are. The data has been
converted to a store, and of a loss of torch's the divisor has been taken.

This module also describes what a training consists of, so that several processes can compare it. The model's weights
are left out of that: all processes take those of the first one.
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
_MODULE_ATTRIBUTES = vars(nn.Module()).keys()
"""Attributes of every module: its mode, and containers that are looked at separately."""
_CALLED_METHODS = ("forward", "propagate", "message", "aggregate", "update", "edge_updater", "edge_update")
"""The methods of a module that torch or PyG calls by name."""
FIXED_PACKAGES = ("torch", "builtins", "numpy")
"""Packages that are assumed not to change while a program runs."""
_DATA_ATTRIBUTES = (
    *("x", "y", "edge_index", "edge_weight", "edge_attr", "edge_type", "adj_t"),
    *(f"{split}_{form}" for split in ("train", "val", "valid", "test") for form in ("mask", "idx", "y")),
)
"""The attributes of PyG's data that a conversion reads."""
_COMPARABLE_TYPES = (*PLAIN, complex, bytes, range, slice, Enum, torch.dtype, torch.device, np.ndarray)
"""Types whose values are compared by equality."""
_CONTAINERS = (list, tuple, dict, deque, set, frozenset)
_MODULES_AND_FUNCTIONS = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial)
_REFLECTION_NAMES = frozenset(
    ("getattr", "vars", "__dict__", "attrgetter", "eval", "exec", "__getattribute__", "__getattr__")
)
"""Names by whose use a function may read attributes that its code does not name."""
_EMPTY = CellType()
_MOST_HASHED_BYTES = 1 << 26
"""The largest tensor that is compared by its content, in bytes (0.05 s). A larger one is compared by its identity and
by how often it was written into."""
_CHANGED_MESSAGE = (
    "has changed since the trainer was made, which it does not see: make another Trainer with the model and its "
    "optimizer"
)
_CHANGES_MESSAGE = (
    "changes whenever the model runs, which is once for all epochs or once for every tile: leave it as it is"
)


class ModelSnapshot:
    """The state of ``model`` when this was made; with ``around`` also of all that its functions refer to."""

    def __init__(self, model: nn.Module, *, around: bool = True) -> None:
        self._model, self._with_around = model, around
        self._constants, self._frozen = self._capture(), _frozen(model)

    def _capture(self) -> dict[str, object]:
        found = dict(constants(self._model, around=self._with_around))
        if self._with_around:
            found |= {f"the value of {name}": [buffer] for name, buffer in _buffers_read_as_numbers(self._model)}
        return {name: [*map(_comparable, one)] if isinstance(one, list) else one for name, one in found.items()}

    def check(self, *, tried: bool = False) -> None:
        """Raise ModelError naming what has changed; ``tried``: since the model was tried and traced."""
        there = self._capture()
        for name in [*self._constants, *there]:
            before, now = self._constants.get(name), there.get(name)
            is_equal = isinstance(before, (*PLAIN, list)) and isinstance(now, (*PLAIN, list)) and before == now
            if before is not now and not is_equal:
                raise ModelError(f"{name} of the model {_CHANGES_MESSAGE if tried else _CHANGED_MESSAGE}")
        if self._model.training and (changed := sorted(self._frozen ^ _frozen(self._model))):
            raise ModelError(f"{changed[0]}.training of the model {_CHANGED_MESSAGE}")


def _frozen(model: nn.Module) -> set[str]:
    """Return the submodules in evaluation mode of a model in training mode.

    The model as a whole may be put in evaluation mode between epochs.
    """
    return {name for name, part in model.named_modules() if model.training and not part.training}


@dataclass(frozen=True, slots=True)
class _TensorVersion:
    """The identity of a tensor, and how often it was written into."""

    which: int
    times: int
    held: Tensor = field(compare=False)


def _comparable(one: object) -> object:
    """Return the content of a tensor or array in a form that can be compared; return anything else unchanged."""
    if isinstance(one, Tensor):
        if one.is_meta or one.layout is not torch.strided or one.nbytes > _MOST_HASHED_BYTES:
            return _TensorVersion(id(one), 0 if one.is_inference() else one._version, one)
        one = one.detach().as_subclass(Tensor).cpu().contiguous()
        return str(one.dtype), tuple(one.shape), crc32(one.reshape(-1).view(torch.uint8).numpy().data)
    return (str(one.dtype), one.shape, crc32(one.tobytes())) if isinstance(one, np.ndarray) else one


class LossSnapshot:
    """The state of ``loss`` when this was made.

    A loss module of torch's is computed by the values it had when the trainer was made, so all of them count. A
    function or module of the user's (``is_own``) is called as it is; only its booleans and strings count, since these
    may decide whether it is a mean.
    """

    def __init__(self, loss: object, *, is_own: bool) -> None:
        self._loss, self._is_user_object = loss, is_own
        self._parts = self._capture()

    def _capture(self) -> dict[str, object]:
        modules = self._loss.named_modules() if isinstance(self._loss, nn.Module) else [("", self._loss)]
        parts = [
            (f"{path}.{name}".lstrip("."), one)
            for path, part in modules
            for name, one in [*getattr(part, "__dict__", {}).items(), *getattr(part, "_buffers", {}).items()]
            if name not in _MODULE_ATTRIBUTES
        ]
        parts += [found for function in _user_functions_in(self._loss) for found in external_references(function)]
        return {
            name: _comparable(one) for name, one in parts if not self._is_user_object or isinstance(one, (bool, str))
        }

    def check(self) -> None:
        """Raise ModelError naming what has changed."""
        now = self._capture()
        for name in now.keys() | self._parts.keys():
            if now.get(name) != self._parts.get(name):
                raise ModelError(f"{name} of the loss {_CHANGED_MESSAGE}")


class DataSnapshot:
    """The state of PyG's ``data`` when this was made, with the attributes ``beside`` x; empty for any other object.

    It keeps weak references only.
    """

    def __init__(self, data: Any, beside: Sequence[str] = ()) -> None:
        self._data, self._names = ref(data) if hasattr(data, "stores") else lambda: None, (*_DATA_ATTRIBUTES, *beside)
        self._tensors = {name: (ref(one), one._version) for name, one in _tensors_of(data, self._names)}

    def check(self) -> None:
        """Raise TrainingError naming a tensor that was replaced or written into; a tensor may have been deleted."""
        for name, now in _tensors_of(self._data(), self._names):
            tensor, version = self._tensors.get(name, (ref(now), now._version))
            if tensor() is not now or now._version != version:
                raise TrainingError(f"{name} of the data {_CHANGED_MESSAGE}, of the data as it is now")


def _tensors_of(data: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for part in getattr(data, "stores", ()):
        for name in names:
            if isinstance(one := getattr(part, name, None), Tensor) and not one.is_inference():
                yield name if part._key is None else f"{name} of {part._key!r}", one


def constants(model: nn.Module, *, around: bool = True) -> Iterator[tuple[str, object]]:
    """Yield the parts of a model by name: modules, functions, values, parameters and buffers.

    What a list, dictionary or object holds is yielded as a list. With ``around``, functions that the model's functions
    call, and the globals and enclosing variables of all of them, are yielded too.
    """
    attributes = {module: [*_attributes_of(module)] for module in model.modules()}
    every = (value for own in attributes.values() for _, value in own)
    functions = dict.fromkeys(one for value in every for one in _user_functions_in(value))
    called: dict[FunctionType, str] = {}
    found: list[tuple[str, object]] = []
    while functions:
        function, _ = functions.popitem()
        called[function] = f"{function.__module__}.{function.__qualname__}"
        for name, value in external_references(function):
            functions |= dict.fromkeys(one for one in _user_functions_in(value) if one not in called)
            found += [(name, value)] if around else []
    names = set[str]().union(*map(_names_in, called))
    read = set[str]().union(*(_instruction_names(function.__code__, "LOAD_") for function in called))
    kept = cache(
        lambda: {
            name for kind in {type(module) for module in model.modules()} for name in _attributes_set_in_forward(kind)
        }
    )
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield path or type(model).__name__, module
        takes_all = _may_be_read_indirectly(module, read)
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
    own = {*map(_storage_key, (*model.parameters(), *model.buffers()))}
    opened: dict[int, object] = {}
    for name, value in found:
        if not _is_user_object(value):
            leaves = [one for one in _leaves(value, names, own) if around or isinstance(one, PLAIN)]
            yield from [(name, leaves)] if leaves else []
        elif id(value) not in opened:
            opened[id(value)] = value
            found += [(f"{name}.{part}", one) for part, one in _attributes_named(value, names)]


def _leaves(
    value: object, names: set[str], own: Collection[object], depth: int = 8, within: tuple[int, ...] = ()
) -> Iterator[object]:
    """Yield the values to be compared in ``value`` and in what it holds.

    Tensors that share memory with a parameter or buffer (``own``) or require a gradient are left out. Of an object of a
    user's class, only the attributes in ``names`` count. ``within`` has the ids of the containers around the value,
    since a container may hold itself.
    """
    if id(value) in within:
        return
    if isinstance(value, _COMPARABLE_TYPES):
        yield value
    elif isinstance(value, Tensor):
        if not value.requires_grad and _storage_key(value) not in own:
            yield value
    elif isinstance(value, (set, frozenset)):
        yield frozenset(one for one in value if isinstance(one, PLAIN))
    elif isinstance(value, _CONTAINERS):
        for one in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _leaves(one, names, own, depth, (*within, id(value)))
    elif depth and _is_user_object(value):
        for _, one in _attributes_named(value, names):
            yield from _leaves(one, names, own, depth - 1, within)


def _attributes_set_in_forward(kind: type[nn.Module]) -> set[str]:
    """Return the attributes that the class's ``forward``, or a method it may call, assigns to."""
    found, waiting, seen = set[str](), [*_CALLED_METHODS], set[str]()
    while waiting:
        seen.add(name := waiting.pop())
        function = unwrap(part) if isfunction(part := getattr(kind, name, None)) else None
        if isfunction(function):
            found |= _instruction_names(function.__code__, "STORE_ATTR")
            waiting += [one for one in function.__code__.co_names if one not in seen]
    return found


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of the module and of those of its classes that do not belong to torch."""
    own_kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(FIXED_PACKAGES)]
    for one in (*own_kinds[::-1], module):
        yield from ((name, value) for name, value in vars(one).items() if name not in _MODULE_ATTRIBUTES)


def _may_be_read_indirectly(module: nn.Module, read: Collection[str]) -> bool:
    """Return whether attributes may be read by code that does not name them: by a base class of PyG's or by
    ``getattr``."""
    bases = {kind for kind in type(module).__mro__ if kind.__module__.startswith(FIXED_PACKAGES)} - {nn.Module, object}
    return bool(bases) or not _REFLECTION_NAMES.isdisjoint(read)


def _storage_key(tensor: Tensor) -> object:
    """Return a value that is equal for tensors that share memory."""
    return id(tensor) if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def _is_user_object(value: object) -> bool:
    """Return whether ``value`` is an object of a user's class, which may be changed, and not a module."""
    is_other = isinstance(value, (*_COMPARABLE_TYPES, *_CONTAINERS, *_MODULES_AND_FUNCTIONS))
    return not is_other and not type(value).__module__.startswith(FIXED_PACKAGES)


def _attributes_named(value: object, names: set[str]) -> list[tuple[str, object]]:
    """Return the attributes of an object whose names are in ``names``."""
    parts = {*getattr(value, "__dict__", ())}.union(*(getattr(kind, "__slots__", ()) for kind in type(value).__mro__))
    return [(name, getattr(value, name, None)) for name in sorted(names & parts)]


def _user_functions_in(value: object, depth: int = 2) -> list[FunctionType]:
    """Return the user's functions that ``value`` is, wraps or holds."""
    if isinstance(value, _CONTAINERS):
        held = value.values() if isinstance(value, dict) else value
        return [function for one in held for function in _user_functions_in(one, depth - 1)] if depth else []
    if _is_user_object(value) and not isinstance(value, (staticmethod, classmethod, property)):
        value = type(value).__call__ if callable(value) else None
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, (property, partial)):
        value = value.fget if isinstance(value, property) else value.func
    if not isinstance(value, FunctionType):
        return []
    module = value.__module__ or ""
    # These have caches, for instance of regular expressions.
    is_pythons = module.partition(".")[0] in sys.stdlib_module_names
    return [] if is_pythons or module.startswith(FIXED_PACKAGES) else [value]


def _names_in(function: FunctionType) -> set[str]:
    """Return the globals and attributes that a function names."""
    return set[str]().union(*(code.co_names for code in _nested_codes(function.__code__)))


@cache
def _instruction_names(code: CodeType, kind: str) -> set[str]:
    """Return the names and string constants of instructions whose opcode begins with ``kind``, such as
    ``LOAD_GLOBAL``."""
    named = (one for part in _nested_codes(code) for one in get_instructions(part))
    return {one.argval for one in named if one.opname.startswith(kind) and isinstance(one.argval, str)}


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _nested_codes(one)


def external_references(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function refers to outside of itself, by name.

    That is its globals, the attributes of these that it names, its enclosing variables and its arguments' defaults.
    """
    names = _names_in(function)
    for name in sorted(_instruction_names(function.__code__, "LOAD_GLOBAL") & function.__globals__.keys()):
        value, place = function.__globals__[name], f"{function.__module__}.{name}"
        yield place, value
        owner = value if isinstance(value, type) else type(value)
        if not (value.__name__ if isinstance(value, ModuleType) else owner.__module__).startswith(FIXED_PACKAGES):
            parts = getattr(value, "__dict__", {})
            yield from ((f"{place}.{part}", parts[part]) for part in sorted(names & parts.keys()))
    place = f"{function.__module__}.{function.__qualname__}"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != _EMPTY:
            yield f"{name} around {place}", cell.cell_contents
    yield f"a default of {place}", (function.__defaults__, function.__kwdefaults__)


def _buffers_read_as_numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from torch_geometric.nn import GINConv, GINEConv  # conversion must work without PyG

    for path, module in model.named_modules():
        if isinstance(module, (GINConv, GINEConv)) and not isinstance(module.eps, nn.Parameter):
            yield f"{path}.eps".lstrip("."), module.eps
        if not type(module).__module__.startswith(FIXED_PACKAGES):
            for name, buffer in module.named_buffers(recurse=False):
                if not (buffer.is_floating_point() or is_lazy(buffer)):
                    yield f"{path}.{name}".lstrip("."), buffer


# ---- what a training is made of, in words and checksums, for processes to compare that train together: each has model,
# optimizer and options of its own script or files


_MOST_DEPTH = 4
"""How deep attributes of attributes are described, where objects of the user's hold each other."""
_DESCRIBED_TYPES = (*PLAIN, Tensor, np.ndarray, list, tuple, dict, FunctionType)
"""Types of globals that are described for other processes; others may differ by process."""


def check_software(ranks: Ranks) -> None:
    """Raise OptionError where processes use other versions of packages than the first process."""
    import torch_geometric

    found = {"ooc": __version__, "torch": torch.__version__, "PyG": torch_geometric.__version__}
    found |= {"numpy": np.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    ranks.check_equal(found, f"the software ({', '.join(map(' '.join, found.items()))})")


def described(model: nn.Module, optimizer: Optimizer | None, given: Mapping[str, Any]) -> dict[str, str]:
    """Return a checksum by name for each part of ``model``, for ``optimizer``, and for each of ``given``.

    The checksums are equal in two processes that were given the same.
    """
    found: dict[str, Any] = {f"model.{name}": _canonical(value, weights=True) for name, value in constants(model)}
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        stepped = [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
        found["optimizer"] = type(optimizer).__qualname__, _canonical(optimizer.state_dict()), stepped
    found |= {name: _canonical(value) for name, value in given.items()}
    return {name: hashlib.sha256(repr(said).encode()).hexdigest() for name, said in found.items()}


def _canonical(value: Any, depth: int = _MOST_DEPTH, *, weights: bool = False) -> Any:
    """Return ``value`` in a form whose ``repr`` is the same in every process; ``weights``: leave out tensors'
    contents."""
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
        return value.co_code, value.co_names, [_canonical(one, depth) for one in value.co_consts]
    if isinstance(value, MethodType):
        return [_canonical(one, depth) for one in (value.__func__, value.__self__)]
    if isinstance(value, AveragedModel):  # its weights are set when it is first averaged
        return _canonical([value.avg_fn, value.multi_avg_fn, value.use_buffers, value.n_averaged], depth)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    # Objects of packages whose versions are compared.
    is_nobodys = isinstance(value, FunctionType) and (value.__module__ or "").startswith(FIXED_PACKAGES)
    if depth <= 0 or is_nobodys or isinstance(value, (type, Optimizer)):
        return name
    inner = partial(_canonical, depth=depth - 1)
    if isinstance(value, FunctionType):
        enclosed = [one.cell_contents for one in value.__closure__ or () if one != CellType()]
        named = [(place, inner(one)) for place, one in external_references(value) if isinstance(one, _DESCRIBED_TYPES)]
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
