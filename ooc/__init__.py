# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph GNN training on graphs larger than memory.

``ooc.convert(source, out)`` makes a store, ``ooc.open(path)`` opens one, ``ooc.Trainer`` trains on it.
Names are loaded when first used, so that ``import ooc`` alone imports neither torch nor numpy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ooc.conversion.conversion import convert
    from ooc.storage.store import open_store as open
    from ooc.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "convert", "open"]


def __getattr__(name: str) -> Any:
    if name == "convert":
        from ooc.conversion.conversion import convert

        return convert
    if name == "open":
        from ooc.storage.store import open_store

        return open_store
    if name == "Trainer":
        from ooc.train.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'ooc' has no attribute {name!r}")
