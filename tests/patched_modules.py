# SPDX-License-Identifier: Apache-2.0
"""Functions of ``nn.Module`` that torch.fx puts others in the place of while it traces, replaced once for all traces.

Each time that a class gets another ``__call__`` or ``__getattr__``, Python forgets what it knows of all its subclasses,
which took a fifth of setting up a small training.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import _symbolic_trace


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """Have traces say what is called instead, by a list whose last entry it is."""
    instead: dict[str, list[Callable[..., Any]]] = {}

    def handed_on(name: str) -> Callable[..., Any]:
        functions = instead[name] = [getattr(torch.nn.Module, name)]
        return lambda *given, **options: functions[-1](*given, **options)  # no model's, as it has no ``self``

    class Patched(_symbolic_trace._PatchedFnSetAttr):
        def patch(self) -> None:
            if self.frame_dict is not torch.nn.Module:
                return super().patch()
            instead[self.fn_name].append(self.new_fn)

        def revert(self) -> None:
            if self.frame_dict is not torch.nn.Module:
                return super().revert()
            instead[self.fn_name].pop()

    for name in ("__call__", "__getattr__"):
        patch.setattr(torch.nn.Module, name, handed_on(name))
    patch.setattr(_symbolic_trace, "_PatchedFnSetAttr", Patched)
