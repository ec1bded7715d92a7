# SPDX-License-Identifier: Apache-2.0
"""What others import and no command needs is read where something of it is asked for, which is most of a start's time.

PyG imports all of its datasets, and with them pandas, requests and what language models take. An optimizer of torch
imports torch's compiler when it is made, to say that it is not to be compiled, which nobody asks here. A backward pass
that is given gradients imports sympy, to compare shapes that may be symbols, which here are numbers.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from threading import RLock
from types import ModuleType
from typing import Any

_READING = RLock()


class _Unread(ModuleType):
    """A module that is read when it is asked for what it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # asked by whoever imports from what is no package
            raise AttributeError(name)
        with _READING:
            spec = self.__spec__
            assert spec is not None and spec.loader is not None
            if spec.loader_state is not None:
                spec.loader_state = None
                spec.loader.exec_module(self)
                usual: Any = ModuleType
                self.__class__ = usual
                return getattr(self, name)
        if name in vars(self):  # read by another thread meanwhile
            return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _UnreadCompiler(_Unread):
    """``torch._dynamo`` as long as nothing is compiled: what is not to be compiled is the function itself."""

    def disable(self, function: Any = None, *arguments: Any, **options: Any) -> Any:
        if function is None:
            return self.__getattr__("disable")(*arguments, **options)
        return function

    def graph_break(self, *arguments: Any, **options: Any) -> None:
        """There is no graph."""


class _UnreadShapes(_Unread):
    """``torch.fx.experimental.symbolic_shapes`` as long as shapes are numbers, which compare as they are."""

    def sym_eq(self, one: Any, other: Any) -> Any:
        if all(type(size) is int for size in (*one, *other)):
            return tuple(one) == tuple(other)
        return self.__getattr__("sym_eq")(one, other)

    def expect_true(self, found: Any, skip: int = 0) -> Any:
        return found if type(found) is bool else self.__getattr__("expect_true")(found, skip)


_LATE: dict[str, type[_Unread]] = {
    "torch_geometric.datasets": _Unread,
    "torch._dynamo": _UnreadCompiler,
    "torch.fx.experimental.symbolic_shapes": _UnreadShapes,
}


class _LateLoader(LazyLoader):
    """Python's own has a module read when it is asked for anything, be it what it was just made with."""

    def exec_module(self, module: ModuleType) -> None:
        kind = _LATE[module.__name__]
        super().exec_module(module)
        module.__class__ = kind


class _LateFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _LATE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


def import_late() -> None:
    """From here on, in this process."""
    if _LateFinder not in sys.meta_path:
        sys.meta_path.insert(0, _LateFinder)
