# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph inference under the same budgets: logits, labels or embeddings by the source's node ids.

If only some nodes are wanted, a layer computes the rows from the first to the last that can reach one of them. These
are few if the store is in hop order from those nodes, and at worst all rows. The result is the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ooc.engine.first_aggregation import find_aggregation
from ooc.engine.session import Prepared, Session
from ooc.errors import BudgetError, ModelError, OptionError
from ooc.events import Listener
from ooc.kernels.tensors import largest_columns
from ooc.model.graph import ActiveRows
from ooc.model.layers.decoders import LinkPredictor
from ooc.model.lowering.network import Network, dtype_of
from ooc.model.lowering.values import Aggregate
from ooc.plan import Limits
from ooc.sizes import check_whole, format_size
from ooc.stages.edge_counts import EdgeCounts
from ooc.storage.array import rows_with
from ooc.storage.store import Store, Task
from ooc.storage.traversal import nearest
from ooc.suggestions import check_choice
from ooc.train.embedding import LearntRows
from ooc.train.job import Job
from ooc.train.objective import no_objective
from ooc.train.resources import Resources
from ooc.train.rows_file import AnyArray, Ids, RowsFile
from ooc.train.setup import Saving, lower_model, rounded_to_tiles, setting_of

_SEARCH_BYTES_PER_NODE = 3
_SEARCH_BYTES_PER_WANTED = 40
_SEARCH_BYTES = 16_000_000
"""Bytes held to find the rows that reach the wanted nodes: a mask, distances, sets; ids and rows; pieces of edges."""
_MOST_BLOCK_BYTES = 4 << 20
_BLOCKS_IN_BUDGET = 16
"""How many times smaller than the host budget a block of the table is in its final form, at worst text."""


class What(Enum):
    """The kinds of predictions."""

    LOGITS = "logits"
    """The outputs of the model, [N, C]."""
    LABELS = "labels"
    """The class with the largest logit, [N] int64; for several labels per node 0 or 1 each, [N, L] int8."""
    EMBEDDINGS = "embeddings"
    """The outputs of a hidden layer after its norm and activation, [N, H]."""

    @classmethod
    def of(cls, name: str, task: Task) -> "What":
        """Return the kind of this name; raise OptionError for an unknown one, or one that the task does not have."""
        check_choice("what", name, [what.value for what in cls])
        if cls(name) is cls.LABELS and task is Task.VALUES:
            raise OptionError("the store's task is values, which have no labels; predict logits, these are the values")
        return cls(name)

    def of_outputs(self, outputs_RC: Tensor, task: Task) -> AnyArray:
        """Return rows of the table from outputs, on the host."""
        if self is not What.LABELS:
            return outputs_RC.cpu().numpy()
        if task is Task.CLASSES:
            return largest_columns(outputs_RC).cpu().numpy()
        return (outputs_RC > 0).to(torch.int8).cpu().numpy()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted nodes: ``ids`` of the source as given, ``rows`` of the store, ascending, and their ``places``."""

    ids: AnyArray
    rows: Ids
    places: Ids


class Predictions(ABC):
    """A planned table of predictions. ``write`` or ``read`` computes them; ``close`` frees everything.

    ``called``: the word for what they belong to.
    """

    called = "node"
    id_type: np.dtype[Any] = np.dtype(np.int64)
    """The dtype of the ids of the table's rows."""
    shape: tuple[int, ...]
    """The shape of the table."""
    _prepared: Prepared
    _session: Session

    def __init__(self, store: Store, limits: Limits, what: What, dtype: torch.dtype) -> None:
        """``dtype``: of the model's outputs."""
        self._store, self._limits, self._what = store, limits, what
        self.dtype: np.dtype[np.generic] = np.dtype(str(dtype).removeprefix("torch."))
        """The dtype of the table."""
        if what is What.LABELS:
            self.dtype = np.dtype(np.int64 if store.task is Task.CLASSES else np.int8)

    def _shape_of(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of a table of ``rows`` rows; classes are one number each."""
        return (rows,) if self._what is What.LABELS and self._store.task is Task.CLASSES else (rows, columns)

    @property
    def taken(self) -> tuple[int, int, int]:
        """Return the most bytes that it takes of the device, the host and the disk."""
        plan = self._prepared.plan
        return plan.device_peak_bytes, plan.host_peak_bytes, plan.spill_bytes

    @property
    def columns(self) -> list[str]:
        """Return names of the table's columns, for formats with names; those of logits are the classes' names."""
        name = {What.LOGITS: "logit", What.LABELS: "label", What.EMBEDDINGS: "embedding"}[self._what]
        if self._what is What.LOGITS and self._store.class_names is not None:
            return [f"{name}_{of_class}" for of_class in self._store.class_names]
        return [name] if len(self.shape) == 1 else [f"{name}_{k}" for k in range(self.shape[1])]

    def read(self) -> Tensor:
        """Return the predictions in memory, which is the caller's and not counted."""
        table: AnyArray = np.empty(self.shape, dtype=self.dtype)

        def put(places: Ids, rows: AnyArray, ids: AnyArray) -> None:
            table[places] = rows

        self._run(put)
        return torch.from_numpy(table)

    def result(self, out: str | Path | None, *, force: bool) -> Tensor | None:
        """Return the predictions in memory, or write them to the file ``out``."""
        if out is None:
            return self.read()
        self.write(out, force=force)
        return None

    def write(self, path: str | Path, *, force: bool = False) -> None:
        """Write the predictions to a file, in the format of its suffix: ``.npy``, ``.zarr``, ``.parquet`` or
        ``.csv``."""
        with RowsFile(
            Path(path), self.shape, self.dtype, id_type=self.id_type, force=force, called=self.called
        ) as table:
            self._run(table.put)
            self.close()
            block_bytes = max(1, min(_MOST_BLOCK_BYTES, self._limits.host_bytes // _BLOCKS_IN_BUDGET))
            classes = self._what is What.LABELS and self._store.task is Task.CLASSES
            table.finish(self.columns, block_bytes=block_bytes, values=self._store.class_names if classes else None)

    @abstractmethod
    def _run(self, put: Callable[[Ids, AnyArray, AnyArray], None]) -> None:
        """Compute everything; ``put`` stores rows at their places, with their ids."""

    def _started(self) -> Session:
        """Start the session that runs programs, with its memory and files."""
        if not self._session.started:
            self._session.check_disk()
            self._session.start()
        return self._session

    def close(self) -> None:
        """Free arenas, threads and spill files. May be called twice."""
        self._session.close()


class Prediction(Predictions):
    """A model's planned predictions on a store. ``write`` or ``read`` computes them; ``close`` frees everything.

    ``layer`` counts the hidden layers from 1 (default: the last; for a ``LinkPredictor`` the encoder's output). 0 is
    the trained embedding of the nodes, ``learnt``, in a heterogeneous graph that of ``node_type``. ``nodes`` are ids of
    the source; by default all nodes are predicted, in the order of ``Store.ids``. ``ignore_edge_data``: as in training
    (see ``Trainer``). BudgetError with the least budgets that would suffice.
    """

    _put: Callable[[Ids, AnyArray, AnyArray], None]

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        resources: Resources,
        what: str = "logits",
        *,
        layer: int | None = None,
        nodes: npt.ArrayLike | None = None,
        ignore_edge_data: str = "none",
        node_type: str | None = None,
        learnt: LearntRows | None = None,
    ) -> None:
        store.check_one_graph("prediction by the full graph", takes_types=True)
        super().__init__(store, resources.limits, What.of(what, store.task), dtype := dtype_of(model))
        of_links = isinstance(model, LinkPredictor)
        of_encoder = of_links and layer is None and store.types is not None
        kinds = [*store.types.nodes] if of_encoder and store.types is not None else []
        if self._what is What.EMBEDDINGS and len(kinds) == 1:
            node_type = node_type or kinds[0]
        self._type = node_type or ""
        """The node type whose embedding is wanted; "" in a homogeneous graph, or for predictions of the labelled
        type."""
        if store.types is None or self._what is not What.EMBEDDINGS:
            if node_type is not None:
                raise OptionError("a type of nodes is chosen for their embedding, of a graph with types")
        elif of_encoder:
            if node_type not in kinds or nodes is not None:
                which = f"{store.path}: embeddings are of all nodes of one type, node_type is to be"
                raise OptionError(f"{which} one of {', '.join(kinds)}")
        else:
            known = () if learnt is None else learnt.spaces
            if layer != 0 or node_type not in known or nodes is not None:
                of = f": {', '.join(known)}" if known else ", of which it has none"
                which = f"those that were trained (layer 0), of all nodes of a type{of}"
                raise OptionError(f"{store.path} has several types of nodes or edges: embeddings are {which}")
        self._wanted = wanted = None if nodes is None else _find_rows(store, nodes, self._limits)
        if isinstance(model, LinkPredictor):
            if self._what is not What.EMBEDDINGS:
                raise OptionError(f"a model of links has embeddings of nodes, no {what}; predict embeddings")
            model = model.encoder
        ends = (self._type,) if of_encoder else ()
        setting = setting_of(store, dtype, ignore_edge_data=ignore_edge_data, learnt=learnt, outputs_of=ends)
        lowered = partial(lower_model, model, store, resources, setting, of_classes=False, trains=False)
        resources, network, _ = lowered(savings=(Saving.FIRST_AGGREGATION,))
        once, output = network.aggregated_once, network.evaluation
        is_missing = any(find_aggregation(store, one, network.dtype) is None for one in once)
        # Aggregating all features is not worth it for some nodes, or for a single use.
        if (nodes is not None and is_missing) or (isinstance(output, Aggregate) and output.once):
            resources, network, _ = lowered(savings=())
        least = 1 if learnt is None else 0
        self._layer = network.depth if of_links and layer is None else _layer(self._what, layer, network, least=least)
        reaching = _reaching_rows(store, wanted, network.hops, resources.listener)
        job = Job(
            network,
            store,
            EdgeCounts(store),
            resources,
            rounded_to_tiles(reaching, resources.tile_rows),
            no_objective(store, network.outputs),
            # The planner weighs "train" most.
            lambda made: {"prepare": made.prepare(), "train": made.predict(self._layer, self._store_rows, self._type)},
            extra_host_bytes=wanted.ids.nbytes + wanted.rows.nbytes + wanted.places.nbytes if wanted else 0,
            learnt=learnt,
        )
        nodes_there = store.num_nodes if store.types is None or not self._type else store.types.nodes[self._type]
        columns = network.layer(self._layer, self._type).columns
        self.shape = self._shape_of(len(wanted.rows) if wanted else nodes_there, columns)
        self.id_type = store.id_type_of(self._type)
        self._prepared = job.ready()
        self.plan = self._prepared.plan
        self._session = Session(self._prepared, [model])

    def _run(self, put: Callable[[Ids, AnyArray, AnyArray], None]) -> None:
        self._put = put
        self._started().run("train", "predicting")

    def _store_rows(self, start: int, outputs_RC: Tensor) -> None:
        """Store the rows of a tile at their places."""
        rows, store, of = self._what.of_outputs(outputs_RC, self._store.task), self._store, self._type
        stop = start + len(rows)
        if self._wanted is None:
            self._put(store.read_numbers(start, stop, of), rows, store.read_ids(start, stop, of))
            return
        first, last = np.searchsorted(self._wanted.rows, [start, stop])
        if first < last:
            places = self._wanted.places[first:last]
            self._put(places, rows[self._wanted.rows[first:last] - start], self._wanted.ids[places])


# ---- which rows ----------------------------------------------------------------------------------------------


def _find_rows(store: Store, nodes: npt.ArrayLike, limits: Limits) -> Wanted:
    """Return the rows of the wanted nodes; raise OptionError for unknown or repeated ids."""
    ids, texts = np.asarray(nodes), store.id_type.kind == "S"
    if ids.ndim == 1 and not len(ids):
        raise OptionError("nodes is an empty list; give at least one node id, or leave it out for all nodes")
    if ids.ndim != 1 or ids.dtype.kind not in ("UTO" if texts else "iu"):
        what = "node ids, which are texts in this store" if texts else "node ids"
        raise OptionError(f"nodes must be a list of {what}, not {ids.dtype}{list(ids.shape)}")
    wanted_bytes = _SEARCH_BYTES_PER_WANTED + 3 * (store.id_type.itemsize - 8)
    needed = _SEARCH_BYTES_PER_NODE * store.num_nodes + wanted_bytes * len(ids)
    needed += min(_SEARCH_BYTES, 32 * store.num_edges)
    most = limits.memory_bytes if limits.one_memory else limits.host_bytes
    if needed > most:
        of, option = "on the host, the host budget is", "host_budget"
        if limits.one_memory:
            of, option = "of memory; it may take", "memory"
        what = f"finding what reaches {len(ids):,} nodes needs {format_size(needed)} {of} {format_size(most)}"
        raise BudgetError(f"{what}; give {option}='{-(-needed // 1000)}K'")
    ids = _as_stored(ids, store) if texts else ids.astype(np.int64)
    ascending = np.sort(ids)
    twice = np.flatnonzero(ascending[1:] == ascending[:-1])
    if len(twice):
        raise OptionError(f"node {_id_text(ascending[twice[0]])} is given twice")
    del ascending
    rows = rows_with(ids, store.ids_of_rows())
    if (absent := rows < 0).any():
        there = f"nodes 0 to {store.num_nodes - 1}"
        if store.has("ids"):
            there = f"{store.num_nodes} nodes, by their ids in its source"
        raise OptionError(f"there is no node {_id_text(np.sort(ids[absent])[0])}; the store {store.path} has {there}")
    places = np.argsort(rows)
    return Wanted(ids, rows[places], places)


def _as_stored(ids: AnyArray, store: Store) -> AnyArray:
    """Return texts in the form of the store's ids; raise OptionError for one that is longer than all of those."""
    encoded = [str(text).encode() for text in ids.tolist()]
    width = store.id_type.itemsize
    long = next((text for text in encoded if len(text) > width), None)
    if long is not None:
        raise OptionError(f"there is no node {long[:60].decode(errors='replace')}: ids in {store.path} are shorter")
    return np.array(encoded, dtype=store.id_type)


def _id_text(node: int | bytes) -> str:
    return node.decode() if isinstance(node, bytes) else str(node)


def _reaching_rows(store: Store, wanted: Wanted | None, depth: int, listener: Listener) -> ActiveRows:
    """Return, by hops before the wanted rows, how many leading rows contain all that can reach them."""
    if wanted is None or store.types is not None:
        return ActiveRows.of_store(store, depth, everything=True)
    seeds = np.zeros(store.num_nodes, dtype=np.bool_)
    seeds[wanted.rows] = True
    hops = nearest(store, [seeds], depth, listener)
    last = [int(np.flatnonzero(hops <= hop)[-1]) + 1 for hop in range(depth + 1)]
    return ActiveRows(store.num_nodes, tuple(last), tuple(last))


# ---- what and from which layer ---------------------------------------------------------------------------------


def _layer(what: What, layer: int | None, network: Network, *, least: int) -> int:
    if what is not What.EMBEDDINGS:
        if layer is not None:
            raise OptionError(f"a layer is chosen for embeddings only, not for {what.value}")
        return network.depth
    if network.depth == 1 and (least or layer):
        raise ModelError("a model of one layer has no hidden layer to take embeddings from; predict logits")
    chosen = network.depth - 1 if layer is None else layer
    check_whole(chosen, name="layer", least=0)
    if not least <= chosen < network.depth:
        raise OptionError(f"layer {chosen} is no hidden layer; the model has {least} to {network.depth - 1}")
    return chosen
