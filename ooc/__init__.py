# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph GNN training on graphs larger than memory.

``ooc.convert(source, out)`` makes a store, ``ooc.dataset(name)`` finds a published source for that,
``ooc.open(path)`` opens a store, ``ooc.Trainer`` trains on it.
Names are loaded when first used, so that ``import ooc`` alone imports neither torch nor numpy.
"""

from typing import TYPE_CHECKING, Any

from ooc.version import __version__

if TYPE_CHECKING:
    from ooc.conversion.conversion import convert
    from ooc.conversion.names import dataset
    from ooc.remote import remote_backend
    from ooc.storage.store import open_store as open
    from ooc.train.trainer import Trainer

__all__ = ["Trainer", "__version__", "convert", "dataset", "open", "remote_backend"]


def __getattr__(name: str) -> Any:
    if name == "convert":
        from ooc.conversion.conversion import convert

        return convert
    if name == "dataset":
        from ooc.conversion.names import dataset

        return dataset
    if name == "open":
        from ooc.storage.store import open_store

        return open_store
    if name == "remote_backend":
        from ooc.remote import remote_backend

        return remote_backend
    if name == "Trainer":
        from ooc.train.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'ooc' has no attribute {name!r}")
