# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph GNN training on graphs larger than memory.

    store = ooc.convert(source, "graph.ooc")         an ooc.Store on disk (ooc.dataset: a published one; ooc.open)
    with ooc.Trainer(model, store) as trainer:       a store, its path, or PyG's Data
        trainer.fit(epochs=100); trainer.predict("labels")    embedding=ooc.Embedding(64): nodes without features
    for batch in ooc.NeighborLoader(store, [15, 10], batch_size=1024): ...    sampled mini-batches, PyG's Data
    ooc.GraphTrainer(model, store, batch_nodes=4096); ooc.GraphLoader(…)   many graphs, each with a label
    ooc.LinkTrainer(ooc.LinkPredictor(encoder), store, ooc.Links(pairs))   links instead of nodes
    features, graph = ooc.remote_backend(store)      a store for PyG's own loaders
    with ooc.offload(module, gpu_budget="2G"): ...   any module's two passes in a budget (planner: ooc.plan_chain)
Errors for users, each an ooc.OocError: OptionError, SourceError, StoreError, BudgetError, ModelError, HardwareError,
SpillError, TrainingError, RunError, RankError. ``import ooc`` imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ooc.errors import BudgetError as BudgetError
from ooc.errors import HardwareError as HardwareError
from ooc.errors import ModelError as ModelError
from ooc.errors import OocError as OocError
from ooc.errors import OptionError as OptionError
from ooc.errors import RankError as RankError
from ooc.errors import RunError as RunError
from ooc.errors import SourceError as SourceError
from ooc.errors import SpillError as SpillError
from ooc.errors import StoreError as StoreError
from ooc.errors import TrainingError as TrainingError
from ooc.version import __version__ as __version__

if TYPE_CHECKING:
    from ooc.conversion.conversion import convert as convert
    from ooc.model.layers.decoders import LinkPredictor as LinkPredictor
    from ooc.offloading.offload import offload as offload
    from ooc.plan.chain import plan_chain as plan_chain
    from ooc.sampling.graphs import GraphLoader as GraphLoader
    from ooc.sampling.loader import NeighborLoader as NeighborLoader
    from ooc.sampling.remote import remote_backend as remote_backend
    from ooc.sources.names import dataset as dataset
    from ooc.storage.store import Store as Store
    from ooc.storage.store import open_store as open  # noqa: F401
    from ooc.train.batched.graphs import GraphTrainer as GraphTrainer
    from ooc.train.embedding import Embedding as Embedding
    from ooc.train.links.sets import Links as Links
    from ooc.train.links.trainer import LinkTrainer as LinkTrainer
    from ooc.train.trainer import Trainer as Trainer

_HOMES = {
    "Embedding": ("ooc.train.embedding", "Embedding"),
    "GraphLoader": ("ooc.sampling.graphs", "GraphLoader"),
    "GraphTrainer": ("ooc.train.batched.graphs", "GraphTrainer"),
    "LinkPredictor": ("ooc.model.layers.decoders", "LinkPredictor"),
    "LinkTrainer": ("ooc.train.links.trainer", "LinkTrainer"),
    "Links": ("ooc.train.links.sets", "Links"),
    "NeighborLoader": ("ooc.sampling.loader", "NeighborLoader"),
    "Store": ("ooc.storage.store", "Store"),
    "Trainer": ("ooc.train.trainer", "Trainer"),
    "convert": ("ooc.conversion.conversion", "convert"),
    "dataset": ("ooc.sources.names", "dataset"),
    "offload": ("ooc.offloading.offload", "offload"),
    "open": ("ooc.storage.store", "open_store"),
    "plan_chain": ("ooc.plan.chain", "plan_chain"),
    "remote_backend": ("ooc.sampling.remote", "remote_backend"),
}
# There is no __all__: a star would hide the builtin open, and help() would print every class in full.


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ooc' has no attribute {name!r}")
    module, its_name = _HOMES[name]
    return getattr(import_module(module), its_name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__", *(name for name in globals() if name.endswith("Error"))])
