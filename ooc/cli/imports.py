# SPDX-License-Identifier: Apache-2.0
"""Lazy imports of modules that libraries import at start-up although most commands never use them.

These imports take most of the time a command needs to start. PyG imports all of its datasets, and with them pandas,
requests and dependencies of language models. Each new torch optimizer imports torch's compiler, only to exclude itself
from compilation. A backward pass that is given gradients imports sympy, to compare shapes that may be symbolic; ours
are numbers.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from threading import RLock
from types import ModuleType
from typing import Any

_LOADING = RLock()


class _LazyModule(ModuleType):
    """A module whose code runs at the first access to an attribute that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # asked for by imports from a module that is no package
            raise AttributeError(name)
        with _LOADING:
            spec = self.__spec__
            assert spec is not None and spec.loader is not None
            if spec.loader_state is not None:
                spec.loader_state = None
                spec.loader.exec_module(self)
                usual: Any = ModuleType
                self.__class__ = usual
                return getattr(self, name)
        if name in vars(self):  # loaded by another thread meanwhile
            return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _LazyCompiler(_LazyModule):
    """A stand-in for ``torch._dynamo`` while nothing is compiled: disabling compilation returns the same function."""

    def disable(self, function: Any = None, *arguments: Any, **options: Any) -> Any:
        if function is None:
            return self.__getattr__("disable")(*arguments, **options)
        return function

    def graph_break(self, *arguments: Any, **options: Any) -> None:
        """Do nothing, because there is no graph to break."""


class _LazyShapes(_LazyModule):
    """A stand-in for ``torch.fx.experimental.symbolic_shapes`` that compares shapes of plain numbers itself."""

    def sym_eq(self, one: Any, other: Any) -> Any:
        if all(type(size) is int for size in (*one, *other)):
            return tuple(one) == tuple(other)
        return self.__getattr__("sym_eq")(one, other)

    def expect_true(self, found: Any, skip: int = 0) -> Any:
        return found if type(found) is bool else self.__getattr__("expect_true")(found, skip)


_LAZY_MODULES: dict[str, type[_LazyModule]] = {
    "torch_geometric.datasets": _LazyModule,
    "torch._dynamo": _LazyCompiler,
    "torch.fx.experimental.symbolic_shapes": _LazyShapes,
}


class _LazyModuleLoader(LazyLoader):
    """A lazy loader whose modules load when an attribute is missing; modules of Python's own load at any access."""

    def exec_module(self, module: ModuleType) -> None:
        kind = _LAZY_MODULES[module.__name__]
        super().exec_module(module)
        module.__class__ = kind


class _LazyModuleFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _LAZY_MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyModuleLoader(spec.loader)
        return spec


def import_lazily() -> None:
    """Import the modules in ``_LAZY_MODULES`` lazily from now on in this process."""
    if _LazyModuleFinder not in sys.meta_path:
        sys.meta_path.insert(0, _LazyModuleFinder)
