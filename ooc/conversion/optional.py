# SPDX-License-Identifier: Apache-2.0
"""Packages that single formats need and that an installation may do without."""

from importlib import import_module
from pathlib import Path
from typing import Any

from ooc.errors import SourceError


def optional(module: str, path: Path) -> Any:
    """The ``module``, to read ``path``; SourceError with the remedy where its package is not installed."""
    try:
        return import_module(module)
    except ImportError:
        package = {"yaml": "pyyaml"}.get(module, module.partition(".")[0])
        raise SourceError(f"{path} needs the package {package} to be read; pip install {package}") from None
