# SPDX-License-Identifier: Apache-2.0
"""Mini-batches of a store in place of PyG's ``NeighborLoader``: sampled ahead, and read from the SSD ahead.

Two threads serve an epoch. One samples several batches at once, so that the rows they will need are known. The other
reads the rows of one batch while the one before is in use. N nodes; n nodes and e edges of a batch.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ooc.errors import OptionError, StoreError
from ooc.events import Listener, ignore
from ooc.kernels.dropout.edges import key_of
from ooc.memory import available_memory_bytes
from ooc.model.graph import damaged, load_offsets
from ooc.plan.workload import Direction
from ooc.prefetch.engines.choice import choose_engine
from ooc.sampling.budget import BATCHES_ALIVE, BatchPlan, Division, work_pages
from ooc.sampling.pages import (
    MOST_BATCHES,
    SUM_BYTES,
    Foresight,
    PagedRows,
    Pages,
    Places,
    ResidentRows,
    Rows,
    SparseRows,
    Sums,
    Uses,
    most_pages_of_row,
    pages_of,
)
from ooc.sampling.runs import Ints
from ooc.sampling.sampler import SampledBatch, Sampler, most_by_hop
from ooc.sizes import parse_size
from ooc.storage.array import AnyArray, Array, rows_with
from ooc.storage.sparse_array import SparseArray
from ooc.storage.store import EDGE_FEATURES, EDGE_WEIGHT, SPLITS, Store, open_store
from ooc.suggestions import check_choice
from ooc.threads import ahead

if TYPE_CHECKING:
    from torch_geometric.data import Data

T = TypeVar("T")
_DEFAULT_SHARE = 0.5
"""The share of the free memory that is taken by default."""
_CHUNK_ROWS = 1 << 16
_SHUFFLED = 2**32
"""The key, beside seed and epoch, of the order of the seeds; no batch has this number."""
_SUPERBATCHES = 3
"""Groups of sampled batches at once: one whose rows are read, the next one, and one being sampled."""
_MOST_LOOKAHEAD = 64
"""The most batches known ahead; knowing more hardly saves a read."""
_LOOKAHEAD_SHARE, _TOPOLOGY_SHARE, _ROWS_SHARE = 3, 2, 8
"""Shares of the memory left: a third at most for sampling ahead, a half for topology, an eighth for each other
array."""
_DRAWN_EDGE_BYTES = 96
"""Bytes for each edge of a batch while it is sampled: places, random numbers, sorting."""
_TAKEN_BYTES, _TAKEN_PAGE_BYTES = 48, 96
"""Bytes for each row, and each of its pages, while rows are copied: their order, their places, and what is read."""


_OWN_THREADS = "the loader has threads of its own, which sample and read ahead; leave it out"
_AS_DRAWN = "batches have the edges that are drawn, each once, of all nodes that a hop has reached"
_ALIKE = "neighbours are drawn evenly, without replacement, by seed= and epoch alone"
_PYG_ARGUMENTS: dict[str, tuple[object, str]] = {
    "num_workers": (0, _OWN_THREADS),
    "persistent_workers": (False, _OWN_THREADS),
    "filter_per_worker": (None, _OWN_THREADS),
    "worker_init_fn": (None, _OWN_THREADS),
    "multiprocessing_context": (None, _OWN_THREADS),
    "prefetch_factor": (None, "memory= decides how far is read ahead; leave it out"),
    "pin_memory": (False, "batches are for the CPU; pin each by batch.pin_memory()"),
    "timeout": (0, "reading waits for the disk as long as it takes; leave it out"),
    "generator": (None, "the order of batches goes by seed= and epoch; leave it out"),
    "sampler": (None, "give the nodes or graphs as input_nodes= or input_graphs=, and shuffle="),
    "batch_sampler": (None, "give the nodes or graphs as input_nodes= or input_graphs=, and batch_size="),
    "collate_fn": (None, "change each batch in the loop"),
    "transform": (None, "change each batch in the loop"),
    "transform_sampler_output": (None, "change each batch in the loop"),
    "subgraph_type": ("directional", _AS_DRAWN),
    "directed": (True, _AS_DRAWN),
    "disjoint": (False, _AS_DRAWN),
    "replace": (False, _ALIKE),
    "weight_attr": (None, _ALIKE),
    "time_attr": (None, _ALIKE),
    "input_time": (None, _ALIKE),
    "temporal_strategy": ("uniform", _ALIKE),
    "neighbor_sampler": (None, _ALIKE),
    "is_sorted": (False, "the store has its edges by target; leave it out"),
    "exclude_keys": (None, "take what you need of each batch"),
    "follow_batch": (None, "take what you need of each batch"),
}
"""Arguments of PyG's loaders that are accepted with one value only, and what to do instead of another value."""


class OpenArrays:
    """What is kept from epoch to epoch: the engine, and each array's ``rows``, whole or in pages."""

    def __init__(self, store: Store, arrays: Sequence[Array], plan: BatchPlan, sums: Sums, listener: Listener) -> None:
        self.store = store
        self.engine, _ = choose_engine(store.path)
        self.close = weakref.finalize(self, self.engine.close)

        def rows(array: Array) -> Rows:
            if isinstance(array, SparseArray):
                return SparseRows(array)
            pages = Pages(array, self.engine, sums, listener)
            if array.name in plan.resident:
                return ResidentRows(pages)
            cached, work = plan.cache_pages.get(array.name, 0), work_pages(array, plan.batch_bytes)
            return PagedRows(pages, cache_pages=cached, work_pages=work)

        self.rows = {array.name: rows(array) for array in arrays}
        self.paged = {name: one for name, one in self.rows.items() if isinstance(one, PagedRows)}


class Loop(Iterator["Data"]):
    """The batches of one iteration; raises OptionError when it is continued after ``end``."""

    def __init__(self, batches: Generator["Data"]) -> None:
        self._batches, self._done, self._reason = batches, False, ""

    def __next__(self) -> "Data":
        if self._reason and not self._done:
            raise OptionError(f"the loop over batches has been ended before its last: {self._reason}")
        try:
            return next(self._batches)
        except StopIteration:
            self._done = True
            raise

    def end(self, reason: str) -> None:
        """End the iteration; continuing it raises an error that names ``reason``."""
        self._reason = self._reason or reason
        self._batches.close()

    def close(self) -> None:
        """End the iteration as ``close`` of a generator does."""
        self._done = True
        self._batches.close()


class BatchLoader:
    """A loader of batches of any kind; a subclass says which ``_arrays`` it reads and makes the ``plan``."""

    store: Store
    plan: BatchPlan
    _held: OpenArrays | None = None
    _running: Any = None

    def __init__(self, store: Store | str | Path, listener: Listener, of_pyg: Mapping[str, Any]) -> None:
        """``listener`` is told of the first reading of all pages; ``of_pyg`` are further arguments of PyG's loaders.

        Raises OptionError for such an argument with a value that would change batches.
        """
        for name, value in of_pyg.items():
            if name not in _PYG_ARGUMENTS:
                raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
            there, instead = _PYG_ARGUMENTS[name]
            if getattr(value, "value", value) != there:
                raise OptionError(f"{type(self).__name__} takes no {name}: {instead}")
        self.store = store if isinstance(store, Store) else open_store(store)
        self._listener, self._sums = listener, Sums()

    def _start_loop(self, batches: Callable[[OpenArrays], Generator["Data"]]) -> Loop:
        """Start an iteration with what is held, and end the one before it."""
        self._end_loop("another one over the same loader has begun; make a loader for each of two at once")
        if self._held is None:
            with self.store.unreplaced():
                self._held = OpenArrays(self.store, self._arrays(), self.plan, self._sums, self._listener)
        made = Loop(self._checked_store(batches(self._held)))
        self._running = weakref.ref(made)
        return made

    def _end_loop(self, reason: str) -> None:
        if self._running is not None and (running := self._running()) is not None:
            running.end(reason)

    def _checked_store(self, batches: Generator["Data"]) -> Generator["Data"]:
        """Yield the batches; raise StoreError where the store is replaced before the last one."""
        with contextlib.closing(batches), self.store.unreplaced():
            yield from batches

    def _arrays(self) -> list[Array]:
        """Return the arrays that batches are read from."""
        raise NotImplementedError

    def _memory_bytes(self, memory: str | int | None) -> int:
        usual = int(_DEFAULT_SHARE * available_memory_bytes())
        return usual if memory is None else parse_size(memory, name="memory")

    @property
    def read_bytes(self) -> int:
        """Bytes read so far, of all arrays."""
        return 0 if self._held is None else int(self._held.engine.counters.read_bytes)

    def close(self) -> None:
        """End the threads and free what the next iteration makes anew. May be called twice; the loader stays usable."""
        self._end_loop("the loader has been closed")
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class NeighborLoader(BatchLoader):
    """Batches of ``batch_size`` seed nodes with sampled neighbours, as PyG's ``NeighborLoader`` makes them.

    ``num_neighbors``: the most in-edges sampled of a node, by hop, without replacement (-1: all). A batch is PyG's
    ``Data`` with ``x`` [n, F], ``edge_index`` [2, e] (by hop), ``y``, ``n_id`` [n] (the seeds first), ``e_id`` [e]
    (places among the store's in-edges), ``input_id``, ``batch_size``, ``num_sampled_nodes``, ``num_sampled_edges``, and
    ``edge_weight`` and ``edge_attr`` where the store's edges have them. Nodes are numbered as before conversion;
    ``row_id`` [n] are their rows in the store. ``y`` has the store's form: classes [n], several labels or values [n,
    L], a single one [n, 1], even if the source had [N].

    ``input_nodes``: the seeds: all nodes (None), a split by name, a mask [N] or numbers; ``shuffle``: in a new order
    each epoch. ``memory`` bounds all that is held, including batches: ``"64M"`` or bytes, by default half of what is
    free. It changes no batch: samples depend on ``seed``, epoch and batch alone.

    An iteration is an epoch; ``epoch`` is the number of the next one and may be set. Pages stay in memory for the next
    epoch until ``close``, the end of a ``with`` block, or the deletion of the loader. Only one iteration may run at a
    time. BudgetError with the least memory that would suffice; StoreError for a damaged store.
    """

    def __init__(
        self,
        store: Store | str | Path,
        num_neighbors: Sequence[int],
        batch_size: int = 1,
        *,
        input_nodes: npt.ArrayLike | str | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        memory: str | int | None = None,
        _beside: Callable[[list[tuple[int, int]], int], int] = lambda most, left: 0,
        _is_own: Callable[[int], bool] = lambda number: True,
        _processes: int = 1,
        _listener: Listener = ignore,
        **of_pyg: Any,
    ) -> None:
        """Make the loader; the arguments with an underscore are for the trainer.

        ``_beside``: from the nodes and edges of the first hops and the bytes left, the bytes that the trainer takes.
        ``_is_own``: whether this process makes the batch of that number; each of ``_processes`` has this memory.
        """
        super().__init__(store, _listener, of_pyg)
        self.store.check_one_graph("a NeighborLoader")
        self.fanouts = check_fanouts(num_neighbors)
        nodes: Any = batch_size
        if not isinstance(nodes, Integral) or int(nodes) < 1:
            raise OptionError(f"batch_size must be a positive whole number, not {batch_size!r}")
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self._shuffle, self._drop_last, self._is_own = shuffle, drop_last, _is_own
        self.seed_rows = rows_of(self.store, input_nodes)
        self._made: tuple[int, list[Ints]] = -1, []
        self._offsets = offsets = load_offsets(self.store, Direction.IN)
        most = most_by_hop(offsets, self.fanouts, min(batch_size, len(self.seed_rows)))
        self.most = most[-1]
        self.plan = self._planned(self._memory_bytes(memory), partial(_beside, most), _processes)
        self._sampler = Sampler(offsets, self.fanouts, seed=seed)

    def _planned(self, memory_bytes: int, beside: Callable[[int], int], processes: int) -> BatchPlan:
        """Return the division of memory.

        First come the rows' offsets, the nodes' places in a batch, and batches as large as degrees and fanouts allow.
        Of the memory left, a third at most lets more batches be sampled ahead. Topology and labels are held whole where
        they take less than their share. The rest is for pages of the features.
        """
        store, (features, *others), (nodes, edges) = self.store, self._arrays(), self.most
        node_rows = sum(array.row_bytes for array in (features, *others) if array.shape[0] == store.num_nodes)
        edge_rows = sum(array.row_bytes for array in others[1:] if array.shape[0] == store.num_edges)
        batch_bytes = nodes * (node_rows + 16) + edges * (edge_rows + 24)
        width = 4 if max(store.num_edges, store.num_nodes) < 2**31 else 8
        pages = min(pages_of(features), nodes * most_pages_of_row(features))
        ids = (width + 4) * (nodes + edges) + 6 * pages
        ahead = _SUPERBATCHES * ids + _TAKEN_BYTES * edges  # the neighbours of all are looked up together
        fixed = self._offsets.nbytes + 4 * store.num_nodes + 24 * len(self.seed_rows) + ahead
        fixed += BATCHES_ALIVE * batch_bytes + _DRAWN_EDGE_BYTES * edges + _TAKEN_BYTES * (nodes + edges)
        fixed += _TAKEN_PAGE_BYTES * (pages + min(pages_of(others[0]), edges))
        drawn = ", ".join("all" if fanout < 0 else str(fanout) for fanout in self.fanouts)
        size = f"{min(self.batch_size, len(self.seed_rows)):,} nodes and of neighbours {drawn}"
        what = f"batches of {size} come to {nodes:,} nodes and {edges:,} edges"
        given = (features, *others), batch_bytes, fixed, beside, memory_bytes, processes
        division = Division(*given, what=what, remedy="a smaller batch or smaller fanouts")
        batches, everything = len(self), sum(division.more.values())
        all_fits = everything <= division.left
        if all_fits:  # knowing further batches gains nothing
            lookahead = min(batches, 1 + (division.left - everything) // _LOOKAHEAD_SHARE // ahead, 4)
        else:
            lookahead = min(MOST_BATCHES, _MOST_LOOKAHEAD, batches, 1 + division.left // _LOOKAHEAD_SHARE // ahead)
        division.left -= (lookahead - 1) * ahead
        for place, array in enumerate(others):
            division.hold(array.name, 1 if all_fits else _ROWS_SHARE if place else _TOPOLOGY_SHARE)
        division.hold(features.name)
        return division.plan(lookahead, {features.name: 0 if features.name in division.resident else division.left})

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(len(self.seed_rows), self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Loop:
        epoch, self.epoch = self.epoch, self.epoch + 1

        def batches(held: OpenArrays) -> Generator["Data"]:
            sampled = ahead(
                with_foresight(held, self._sampled(held, epoch), lambda one: {"x": one[0].rows}), name="ooc-sample"
            )
            return ahead(read_ahead(held, sampled, partial(_data, held)), name="ooc-rows")

        return self._start_loop(batches)

    def _arrays(self) -> list[Array]:
        """Return the features, then neighbours, labels, edges' data, and the rows' numbers before conversion."""
        store = self.store
        found = [store.array("x"), store.topology("in")[1], store.array("y"), *store.edge_data("in")]
        return found if store.attributes.get("order", "none") == "none" else [*found, store.array("perm")]

    @property
    def retained_bytes(self) -> int:
        """Bytes that stay in memory after ``close``."""
        sums = SUM_BYTES * sum(pages_of(array) for array in self._arrays() if array.name not in self.plan.resident)
        return self._offsets.nbytes + 4 * self.store.num_nodes + 16 * len(self.seed_rows) + sums

    def in_degrees(self, rows: AnyArray) -> Ints:
        """Return the in-degree of each of these rows of the store [n]."""
        found: Ints = self._offsets[rows + 1].astype(np.int64) - self._offsets[rows]
        return found

    @property
    def pages_read(self) -> int:
        """Pages of features read so far; those of features held in memory count once."""
        return 0 if self._held is None else self._held.rows["x"].pages_read

    def seeds_of(self, epoch: int) -> list[Ints]:
        """Return an epoch's seeds by batch, as places in ``input_nodes``."""
        if self._made[0] != epoch:
            order = (
                shuffled_order(len(self.seed_rows), self.seed, epoch)
                if self._shuffle
                else np.arange(len(self.seed_rows))
            )
            self._made = epoch, [order[k * self.batch_size : (k + 1) * self.batch_size] for k in range(len(self))]
        return self._made[1]

    def _sampled(self, held: OpenArrays, epoch: int) -> Generator[list[tuple[SampledBatch, Ints]]]:
        """Yield groups of the epoch's batches that are this process's, with their seeds' places in ``input_nodes``.

        A group has as many batches as the plan lets be sampled ahead.
        """
        seeds, own = self.seeds_of(epoch), [number for number in range(len(self)) if self._is_own(number)]

        def take(edges: Ints) -> AnyArray:
            found = held.rows["in/indices"].take(edges)
            if len(found) and not 0 <= int(found.min()) <= int(found.max()) < self.store.num_nodes:
                raise damaged(self.store, "in/indices")
            return found

        for first in range(0, len(own), max(1, self.plan.lookahead)):  # 0 where there is no batch
            numbers = own[first : first + self.plan.lookahead]
            around = [self.seed_rows[seeds[number]] for number in numbers]
            batches = self._sampler.sample(around, take, epoch=epoch, numbers=numbers)
            yield [*zip(batches, (seeds[number] for number in numbers), strict=True)]


def shuffled_order(count: int, seed: int, epoch: int) -> Ints:
    """Return the shuffled order of ``count`` things in an epoch."""
    order = np.arange(count)
    first, second = key_of(seed, epoch, _SHUFFLED)
    np.random.Generator(np.random.Philox(key=first << 32 | second)).shuffle(order)
    return order


def with_foresight(
    held: OpenArrays, groups: Iterable[list[T]], needed: Callable[[T], Mapping[str, AnyArray]]
) -> Generator[tuple[list[T], dict[str, Foresight]]]:
    """Yield each group of batches with the pages that its batches will use, by array that is read in pages.

    A group's uses are known before its first batch, together with the uses of the group after it.
    """
    before: tuple[list[T], dict[str, list[Places]]] | None = None
    for group in chain(groups, [[]]):
        needs: dict[str, list[Places]] = {}
        for batch in group:
            for name, rows in needed(batch).items():
                if name in held.paged:
                    needs.setdefault(name, []).append(held.paged[name].needs(rows))
        if before is not None:
            own = before[1].items()
            yield before[0], {name: held.paged[name].foresee(pages, needs.get(name, ())) for name, pages in own}
        before = group, needs


def read_ahead(
    held: OpenArrays,
    groups: Generator[tuple[list[T], dict[str, Foresight]]],
    made: Callable[[T, dict[str, Uses]], "Data"],
) -> Generator["Data"]:
    """Yield every batch of all groups, built by ``made`` from its uses."""
    with contextlib.closing(groups):
        for group, known in groups:
            for name, foresight in known.items():
                held.paged[name].begin(foresight)
            for place, batch in enumerate(group):
                yield made(batch, {name: foresight.uses[place] for name, foresight in known.items()})


def _data(held: OpenArrays, sampled: tuple[SampledBatch, Ints], uses: Mapping[str, Uses]) -> "Data":
    from torch_geometric.data import Data

    batch, seeds = sampled
    edge_index = np.empty((2, len(batch.edges)), dtype=np.int64)
    edge_index[0], edge_index[1] = batch.sources, np.repeat(np.arange(len(batch.counts)), batch.counts)
    rows = held.rows
    made: dict[str, Any] = {
        "x": rows["x"].take(batch.rows, uses.get("x")),
        "edge_index": edge_index,
        "y": rows["y"].take(batch.rows),
        "n_id": rows["perm"].take(batch.rows) if "perm" in rows else batch.rows.astype(np.int64, copy=False),
        "e_id": batch.edges.astype(np.int64, copy=False),
        "input_id": seeds,
        "row_id": batch.rows.astype(np.int64, copy=False),
    }
    for name, called in ((EDGE_WEIGHT, "edge_weight"), (EDGE_FEATURES, "edge_attr")):
        if f"in/{name}" in rows:
            made[called] = rows[f"in/{name}"].take(batch.edges)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in made.items()}
    return Data(
        **tensors,
        batch_size=len(seeds),
        num_sampled_nodes=batch.nodes_by_hop,
        num_sampled_edges=batch.edges_by_hop,
    )


# ---- what is given ---------------------------------------------------------------------------------------------


def check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """Return ``fanouts`` as a tuple; raise OptionError for invalid ones."""
    asked: Any = fanouts
    is_list = isinstance(asked, Sequence) and len(asked) > 0
    if not is_list or not all(isinstance(fanout, Integral) and (int(fanout) > 0 or fanout == -1) for fanout in asked):
        raise OptionError(f"neighbours to draw must be a number a hop, -1 for all, not {fanouts!r}")
    return tuple(map(int, fanouts))


def rows_of(store: Store, asked: npt.ArrayLike | str | None, name: str = "input_nodes") -> Ints:
    """Return the rows of the nodes or graphs ``asked`` for, in that order.

    Rows of a split, or of all, are in the order before conversion. OptionError, with the argument's ``name``, for
    anything that selects no rows.
    """
    count = store.num_graphs or store.num_nodes
    is_ordered = store.attributes.get("order", "none") != "none"
    called = "graphs" if store.num_graphs else "nodes"
    if isinstance(asked, str):
        split = "valid" if asked == "val" else asked
        check_choice(name, split, SPLITS)
        parts = store.array(f"split/{split}").blocks(_CHUNK_ROWS)
        found = np.concatenate([start + np.flatnonzero(member) for start, member in parts])
        if not len(found):
            raise StoreError(f"{store.path} has no {called} in the split {split}")
        return found[np.argsort(_numbers_of_rows(store, found))] if is_ordered else found
    try:
        given = np.arange(count) if asked is None else np.asarray(asked)
    except (TypeError, ValueError):  # for instance graphs instead of numbers
        given = np.empty(0)
    if given.dtype.kind == "b":
        if given.shape != (count,):
            raise OptionError(f"{name} is a mask of shape {given.shape}; the store has {count} {called}")
        given = np.flatnonzero(given)
    if given.dtype.kind not in "iu" or given.ndim != 1 or not len(given):
        raise OptionError(f"{name} must be a split, a mask of all {called} or numbers of {called}, at least one")
    numbers = given.astype(np.int64)
    if numbers.min() < 0 or numbers.max() >= count:
        raise OptionError(f"{name} has a {called[:-1]} that is not among 0 … {count - 1}")
    if len(np.unique(numbers)) < len(numbers):
        raise OptionError(f"{name} has a {called[:-1]} twice")
    return rows_with(numbers, store.array("perm").blocks(_CHUNK_ROWS)) if is_ordered else numbers


def _numbers_of_rows(store: Store, rows: Ints) -> Ints:
    """Return the numbers that the nodes of these ascending ``rows`` had before conversion."""
    found, done = np.empty_like(rows), 0
    for start, block in store.array("perm").blocks(_CHUNK_ROWS):
        stop = int(np.searchsorted(rows, start + len(block)))
        found[done:stop] = block[rows[done:stop] - start]
        done = stop
    return found
