# SPDX-License-Identifier: Apache-2.0
"""A program in tools/ as a module."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``tools/NAME``; what it puts into the search path goes with the test."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    loader = SourceFileLoader(name, str(TOOLS / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module
