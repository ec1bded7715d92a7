# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter takes most of the time of these tests: what it does over and over it does once here."""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from inspect import getmembers
from math import prod
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Whenever a program is run it goes through all that Triton's language has, to find what is built in, and once more
    for every function that the program calls; for every number it makes a table of all types anew, for every result its
    type and shape, and shapes are compared number by number where they are the same."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
            from triton.runtime import interpreter

            @cache
            def built_in(package: Any) -> list[str]:
                return [name for name, member in getmembers(package) if interpreter.tl.core.is_builtin(member)]

            def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
                for name in built_in(package):
                    member = getattr(package, name)
                    if interpreter.tl.core.is_builtin(member):  # not patched by a function that calls this one
                        interpreter._patch_attr(package, name, member, builder, scope)

            def call(function: Any, *args: Any, **options: Any) -> Any:
                if not function.fn.__module__.startswith("ooc."):  # ours know the language by the program's name of it
                    interpreter._patch_lang(function.fn)
                return function.rewrite()(*args, **options)

            patch.setattr(interpreter, "_patch_builtin", patch_builtin)
            patch.setattr(interpreter.InterpretedFunction, "__call__", call)
            find, known = interpreter._get_np_dtype, dict[str, Any]()

            def dtype_of(kind: Any) -> Any:
                if kind.scalar.name not in known:
                    known[kind.scalar.name] = find(kind.scalar)
                return known[kind.scalar.name]

            make, made = interpreter.tl.block_type.__init__, dict[Any, dict[str, Any]]()

            def init(self: Any, element_ty: Any, shape: Any) -> None:
                key = element_ty.name, *(getattr(size, "value", size) for size in shape)
                if key not in made:
                    make(self, element_ty, shape)
                    made[key] = vars(self).copy()
                vars(self).update(made[key])

            @cache
            def shape_of(*sizes: int) -> tuple[Any, Any]:
                core = interpreter.tl.core
                return core.constexpr(prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

            def init_tensor(self: Any, handle: Any, type: Any) -> None:
                self.handle, self.type, self.dtype = handle, type, type.scalar
                self.numel, self.shape = shape_of(*(type.shape.values if type.is_block() else ()))

            broadcast = interpreter.TritonSemantic.broadcast_impl_value

            def broadcast_unlike(self: Any, one: Any, other: Any) -> Any:
                kinds = one.type, other.type
                alike = all(kind.is_block() for kind in kinds) and kinds[0].shape.values == kinds[1].shape.values
                return (one, other) if alike else broadcast(self, one, other)

            patch.setattr(interpreter.tl.tensor, "__init__", init_tensor)
            patch.setattr(interpreter.TritonSemantic, "broadcast_impl_value", broadcast_unlike)
            patch.setattr(interpreter, "_get_np_dtype", dtype_of)
            patch.setattr(interpreter.tl.block_type, "__init__", init)
        yield
