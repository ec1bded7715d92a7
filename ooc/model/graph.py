# SPDX-License-Identifier: Apache-2.0
"""The constants that an aggregation needs for every row: where its edges start, how it is scaled, whether it counts
itself.

GCN's and mean's coefficients factor into a scaling of rows before and after a plain sum, so the topology on disk is
column indices only:

    gcn   D^-1/2 (A + I) D^-1/2 M      mean   D^-1 A M      sum   A M

If edges have weights, A is a matrix of these, the sum a weighted one, and I the weight of self-loops.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import ModelError, StoreError
from ooc.kernels.aggregate import Own
from ooc.kernels.cuda.segments import long_parts, most_parts
from ooc.plan.workload import Direction, EdgesKey, RelationEdges
from ooc.prefetch.arena import Arena, Bytes
from ooc.storage.store import Store
from ooc.storage.types import EdgeType

_CHUNK_ROWS = 1 << 16
_CHUNK_EDGES = 1 << 18


class Scaling(Enum):
    """How neighbours are weighted in a sum."""

    SUM = "sum"
    MEAN = "mean"
    MEAN_OF_ALL = "mean with self-loops"
    GCN = "gcn"
    GCN_NO_LOOPS = "gcn without self-loops"
    LAPLACIAN = "laplacian"
    """The off-diagonal part of the Laplacian: by out-degrees, ignoring self-loops."""
    RANDOM_WALK = "random walk"
    """As LAPLACIAN, divided by the source's out-degree instead of the square roots of both ends'."""
    WEIGHTED_SUM = "weighted sum"
    WEIGHTED_GCN = "weighted gcn"
    WEIGHTED_GCN_IMPROVED = "weighted gcn with self-loops of weight 2"
    WEIGHTED_GCN_NO_LOOPS = "weighted gcn without self-loops"
    WEIGHTED_LAPLACIAN = "weighted laplacian"
    WEIGHTED_RANDOM_WALK = "weighted random walk"
    REVERSED_SUM = "sum against the edges"
    REVERSED_MEAN = "mean against the edges"
    REVERSED_GCN = "gcn against the edges"
    REVERSED_GCN_NO_LOOPS = "gcn against the edges without self-loops"

    @property
    def basic(self) -> "Scaling":
        """The scaling without its edge type."""
        return self

    @property
    def label(self) -> str:
        """A name for matrices that are summed in this way."""
        return self.name.lower()

    @property
    def reversed(self) -> bool:
        """Whether it sums over out-neighbours, and by out-degrees."""
        return self.name.startswith("REVERSED")

    @property
    def weighted(self) -> bool:
        """Whether edges count by their weights in the store."""
        return self.value.startswith("weighted")

    @property
    def normalized(self) -> bool:
        """Whether rows are scaled by the degrees of both ends, before and after the sum, or of sources alone."""
        return not self.plain and self not in (Scaling.MEAN, Scaling.MEAN_OF_ALL, Scaling.REVERSED_MEAN)

    @property
    def within_a_type(self) -> bool:
        """Whether both ends of edges must be of one type, because both are scaled or self-loops are added."""
        return self.normalized or self.loop_weight is not None

    @property
    def loop_weight(self) -> float | None:
        """The weight of the self-loop that is added to a row without one; None if none is added."""
        return _LOOP_WEIGHTS.get(self)

    @property
    def may_vanish(self) -> bool:
        """Whether a row's factor may be 0: without self-loops some rows have no edges, and weights may be 0."""
        return self in _MAY_VANISH or (self.weighted and self.normalized)

    @property
    def plain(self) -> bool:
        """Whether nothing is scaled."""
        return self in (Scaling.SUM, Scaling.WEIGHTED_SUM, Scaling.REVERSED_SUM)

    def against_the_edges(self) -> "Scaling | None":
        """Return the same scaling over neighbours at the other end of edges; None if there is none."""
        return Scaling.__members__.get(f"REVERSED_{self.name}")


_LOOP_WEIGHTS = {
    Scaling.MEAN_OF_ALL: 1.0,
    Scaling.GCN: 1.0,
    Scaling.WEIGHTED_GCN: 1.0,
    Scaling.WEIGHTED_GCN_IMPROVED: 2.0,
    Scaling.REVERSED_GCN: 1.0,
}
RANDOM_WALKS = (Scaling.RANDOM_WALK, Scaling.WEIGHTED_RANDOM_WALK)
LAPLACIANS = (Scaling.LAPLACIAN, Scaling.WEIGHTED_LAPLACIAN, *RANDOM_WALKS)
_MAY_VANISH = (Scaling.GCN_NO_LOOPS, *LAPLACIANS, Scaling.REVERSED_GCN_NO_LOOPS)


@dataclass(frozen=True, slots=True)
class RelationScaling:
    """A scaling ``basic`` of sums over the edges of one type, by their own degrees. Between nodes of two types it is a
    sum or a mean. Attention and the like count as sums."""

    basic: Scaling
    relation: EdgeType

    def __post_init__(self) -> None:
        assert not self.basic.within_a_type or self.relation.source == self.relation.target

    @property
    def label(self) -> str:
        return f"{self.basic.label}.{self.relation.folder}"

    @property
    def value(self) -> str:
        return f"{self.basic.value} over {self.relation}"


AnyScaling = Scaling | RelationScaling


def ends_of(scaling: AnyScaling) -> tuple[str, str]:
    """Return the node types of the summed rows and of the results; "" if the graph has only one type."""
    relation = scaling.relation if isinstance(scaling, RelationScaling) else None
    return ends_of_edges(relation, flipped=scaling.basic.reversed)


def ends_of_edges(relation: EdgeType | None, *, flipped: bool) -> tuple[str, str]:
    """Return the node types that edges lead from and to, as stored or flipped; "" for all edges."""
    source, target = ("", "") if relation is None else (relation.source, relation.target)
    return (target, source) if flipped else (source, target)


@dataclass(frozen=True, slots=True)
class RowScaling:
    """The factors of every row for one scaling, in host memory: ``scale_N1`` and ``self_N1`` in the compute dtype. A
    device gets them tile by tile.

    ``before``, ``after``: rows are scaled before the sum, after it, or both. ``self_term``: every row counts itself
    once; ``self_N1`` is then the weight of its self-loop minus that of self-loops already among its edges, or ``None``
    if that is 1 everywhere.
    """

    scale_N1: Tensor | None = None
    before: bool = False
    after: bool = True
    self_term: bool = False
    self_N1: Tensor | None = None

    def own(self, rows: slice, source: Tensor) -> Own:
        """Return the factor of these rows as summands of their own, on the device of ``source``."""
        if not self.self_term:
            return None
        return 1.0 if self.self_N1 is None else self.self_N1[rows].to(source.device, non_blocking=True)

    def scale(self, start: int, rows_RC: Tensor) -> Tensor | None:
        """Return the factors [R, 1] after the sum for rows from ``start`` on, on the device of the rows; ``None`` for a
        plain sum."""
        if self.scale_N1 is None:
            return None
        return self.scale_N1[start : start + rows_RC.shape[0]].to(rows_RC.device, non_blocking=True)


_PLAIN = RowScaling()


@dataclass(slots=True)
class GraphRows:
    """Constants of rows in host memory: ``offsets`` [N+1] by topology, the factors of each of the model's scalings,
    and, for the kernels of a device with memory of its own, ``parts`` of long rows [P, 2]
    (``kernels.cuda.segments``)."""

    offsets: dict[EdgesKey, npt.NDArray[np.signedinteger]] = field(default_factory=dict)
    parts: dict[EdgesKey, npt.NDArray[np.signedinteger]] = field(default_factory=dict)
    scalings: Mapping[AnyScaling, RowScaling] = field(default_factory=dict)

    def memory(self) -> Iterator[Bytes]:
        """Yield the memory of all constants. It lies on pages of its own, since parts of it are copied to a device."""
        yield from (offsets.view(np.uint8) for offsets in self.offsets.values())
        yield from (parts_P2.reshape(-1).view(np.uint8) for parts_P2 in self.parts.values() if len(parts_P2))
        for scaling in self.scalings.values():
            for constants_N1 in (scaling.scale_N1, scaling.self_N1):
                if constants_N1 is not None:
                    yield constants_N1.view(-1).view(torch.uint8).numpy()

    def scaled(self, scaling: AnyScaling) -> RowScaling:
        """Return the factors of ``scaling``; no scaling if it is not known."""
        return self.scalings.get(scaling, _PLAIN)

    def most_edges(self, direction: EdgesKey) -> int:
        """Return the most edges of any row, 0 if the topology is not known."""
        offsets = self.offsets.get(direction, np.zeros(1, dtype=np.int64))
        return _most_edges(lambda start, stop: offsets[start:stop], len(offsets) - 1)


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """How many leading rows a stage must compute: element d is for values d hops before the scored rows.

    ``training`` counts from the rows of the loss, ``scoring`` from those of any split. Both have one element more than
    the network has layers, and never shrink: every in-neighbour of the rows of one element is among those of the next.
    Without hop order all elements are ``nodes``. ``others``: for a graph with types, by type; the rest is that of the
    scored type.
    """

    nodes: int
    training: tuple[int, ...]
    scoring: tuple[int, ...]
    others: Mapping[str, "ActiveRows"] = field(default_factory=dict)

    def of(self, space: str) -> "ActiveRows":
        """Return the active rows of nodes of type ``space``, "" if there is only one."""
        return self.others.get(space, self)

    def training_rows(self, hops: int) -> int:
        """Return the rows within ``hops`` of those of the loss; all rows if the network reaches farther than this was
        made for."""
        return self.training[hops] if hops < len(self.training) else self.nodes

    def scoring_rows(self, hops: int) -> int:
        """Return the rows within ``hops`` of those of any split; all rows if the network reaches farther than this was
        made for."""
        return self.scoring[hops] if hops < len(self.scoring) else self.nodes

    @classmethod
    def everything(cls, nodes: int, depth: int) -> "ActiveRows":
        """Return active rows that leave nothing out."""
        return cls(nodes, (nodes,) * (depth + 1), (nodes,) * (depth + 1))

    @classmethod
    def of_store(cls, store: Store, depth: int, *, everything: bool = False) -> "ActiveRows":
        """Return the active rows of a store in hop order, from the counts it was written with. All rows are active in
        any other store, or with ``everything``."""
        types, attributes = store.types, store.attributes
        nodes = {"": store.num_nodes} if types is None else types.nodes

        def up_to(counts: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(1, int(counts[min(d, len(counts) - 1)])) for d in range(depth + 1))

        if everything or attributes.get("order") != "hop":
            found = {name: cls.everything(count, depth) for name, count in nodes.items()}
        else:
            hops = {"": (attributes["hops"], attributes["train_hops"])} if types is None else types.hops
            found = {name: cls(nodes[name], up_to(train), up_to(scored)) for name, (scored, train) in hops.items()}
        return found[""] if types is None else replace(found[types.labelled], others=found)


def damaged(store: Store, array: str) -> StoreError:
    """Return the error for a store whose ``array`` cannot be what was written."""
    return StoreError(f"{array} of the store {store.path} is damaged; ooc verify tells where; convert again")


def directions(store: Store) -> tuple[Direction, ...]:
    """Return the distinct topologies of a store: an undirected one is its own transpose."""
    return (Direction.IN,) if store.undirected else (Direction.IN, Direction.OUT)


_GRAPH_DIRECTIONS = (Direction.IN, Direction.OUT, Direction.FEATURES)


def _stored_topologies(store: Store) -> tuple[Direction, ...]:
    """Return the distinct topologies of a store, sparse features and links; for a graph with types, links alone."""
    links = [side for side in Direction if side not in _GRAPH_DIRECTIONS and store.has(f"{side.value}/indptr")]
    if store.types is not None:
        return (*links,)
    features = (Direction.FEATURES,) if store.sparse_features is not None else ()
    return (*directions(store), *features, *links)


def are_between_types(store: Store, direction: EdgesKey) -> bool:
    """Whether these edges have ends of two types."""
    if store.types is None or not isinstance(direction, RelationEdges):
        return False
    kind = store.types.by_folder(direction.folder)
    return kind.source != kind.target


def reverse_of(store: Store, direction: EdgesKey) -> EdgesKey | None:
    """Return the direction in which the same edges, or links, are stored from their other ends; None if they are
    not."""
    if isinstance(direction, RelationEdges):
        other = Direction.OUT if direction.direction is Direction.IN else Direction.IN
        return replace(direction, direction=other)
    found = {
        Direction.IN: directions(store)[-1],
        Direction.OUT: Direction.IN,
        Direction.LINKS: Direction.LINKS_REVERSED,
        Direction.SCORED_LINKS: Direction.SCORED_LINKS_REVERSED,
    }
    side = found.get(direction) if isinstance(direction, Direction) else None
    return side if store.types is None and side in _stored_topologies(store) else None


def topologies(store: Store, scalings: Collection[AnyScaling]) -> list[EdgesKey]:
    """Return all topologies that a network with these scalings may pull over; for a graph with types, those of its edge
    types."""
    relations = dict.fromkeys(s.relation for s in scalings if isinstance(s, RelationScaling))
    edges = [RelationEdges(one.folder, side) for one in relations for side in (Direction.IN, Direction.OUT)]
    return [*edges, *_stored_topologies(store)]


def offset_itemsize(store: Store) -> int:
    of_types = [] if store.types is None else store.types.edges.values()
    most = max([*of_types, *(store.topology(side.value)[1].shape[0] for side in _stored_topologies(store))])
    return 4 if most < 2**31 else 8


def rows_nbytes(store: Store, scalings: Collection[AnyScaling], itemsize: int, *, on_device: bool) -> int:
    """Return the host bytes that ``load_rows`` will take, for admission beforehand; an upper bound if there may be long
    rows."""
    places = constants = 0
    for side in topologies(store, scalings):
        indptr, indices = store.topology(side.value)
        places += indptr.shape[0] + 2 * on_device * most_parts(indices.shape[0])
    for scaling in scalings:
        rows = store.num_nodes if store.types is None else store.types.nodes[ends_of(scaling)[1]]
        constants += rows * ((not scaling.basic.plain) + _has_own_factor(store, scaling))
    return places * offset_itemsize(store) + constants * itemsize


def _has_own_factor(store: Store, scaling: AnyScaling) -> bool:
    """Whether a row's own summand differs from row to row, or from 1."""
    weight = 1.0 if scaling.basic in LAPLACIANS else scaling.basic.loop_weight
    return weight is not None and (_count_self_loops(store, scaling) > 0 or weight != 1.0)


def _count_self_loops(store: Store, scaling: AnyScaling) -> int:
    """Return the number of self-loops. Raises StoreError if nobody has counted them."""
    side = _in_edges_key(scaling).value
    found = store.self_loops(side)
    if found is None:
        raise StoreError(f"{store.path} does not say how many self-loops {side} has; convert again")
    return found


def _in_edges_key(scaling: AnyScaling) -> EdgesKey:
    if isinstance(scaling, RelationScaling):
        return RelationEdges(scaling.relation.folder, Direction.IN)
    return Direction.IN


def load_rows(store: Store, scalings: Collection[AnyScaling], dtype: torch.dtype, *, on_device: bool) -> GraphRows:
    """Read offsets and derive ``scalings``, in chunks of rows so that nothing larger than the result is held.
    ``on_device``: also list the parts of long rows."""
    offsets = {side: load_offsets(store, side) for side in topologies(store, scalings)}
    parts = {direction: _list_long_parts(stops) for direction, stops in offsets.items()} if on_device else {}
    found = {
        scaling: _row_scaling(store, scaling, offsets[_degree_topology(store, scaling)], dtype) for scaling in scalings
    }
    return GraphRows(offsets, parts, found)


def _degree_topology(store: Store, scaling: AnyScaling) -> EdgesKey:
    """Return the topology whose degrees a scaling goes by."""
    by_out_degrees = scaling.basic.reversed or scaling.basic in LAPLACIANS
    if isinstance(scaling, RelationScaling):
        return RelationEdges(scaling.relation.folder, Direction.OUT if by_out_degrees else Direction.IN)
    return directions(store)[-1] if by_out_degrees else Direction.IN


def _list_long_parts(offsets: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    chunks = [
        long_parts(offsets[start : start + _CHUNK_ROWS + 1], start)
        for start in range(0, max(1, len(offsets) - 1), _CHUNK_ROWS)
    ]
    count = sum(map(len, chunks))
    if not count:
        return chunks[0]
    parts_P2 = _allocate_on_own_pages(2 * count * offsets.itemsize).view(offsets.dtype).reshape(count, 2)
    return np.concatenate(chunks, out=parts_P2)


def load_offsets(store: Store, direction: EdgesKey) -> npt.NDArray[np.signedinteger]:
    """Return where every row's edges begin, and where the last one's end [N+1]."""
    indptr, indices = store.topology(direction.value)
    n, offset_type = indptr.shape[0] - 1, np.dtype(f"i{offset_itemsize(store)}")
    rows: npt.NDArray[np.signedinteger] = _allocate_on_own_pages((n + 1) * offset_type.itemsize).view(offset_type)
    for start in range(0, n + 1, _CHUNK_ROWS):
        stop = min(n + 1, start + _CHUNK_ROWS)
        rows[start:stop] = indptr.read(start, stop)
        before = max(0, start - 1)
        if (np.diff(rows[before:stop]) < 0).any() or rows[0] != 0 or rows[start:stop].max() > indices.shape[0]:
            raise damaged(store, indptr.name)
    if rows[n] != indices.shape[0]:
        raise damaged(store, indptr.name)
    return rows


def largest_edge_ratio(store: Store) -> float:
    """Return the largest ratio of edges, or links of a step, to rows. Scored links need no backward pass and do not
    count. For a graph with types, links alone count."""
    found = [
        store.topology(side.value) for side in _stored_topologies(store) if side.of_edges or side is Direction.LINKS
    ]
    return max((indices.shape[0] / (indptr.shape[0] - 1) for indptr, indices in found), default=0.0)


def most_edges(store: Store, relation: EdgeType | None = None) -> int:
    """Return the most edges or links of any row, before offsets are loaded; for a graph with types, of links, or of the
    edges of one type."""
    known = Direction.IN, Direction.OUT, Direction.LINKS, Direction.SCORED_LINKS
    if relation is not None:
        sides: Sequence[EdgesKey] = [RelationEdges(relation.folder, side) for side in (Direction.IN, Direction.OUT)]
    else:
        sides = [side for side in _stored_topologies(store) if side in known]
    offsets = (store.topology(side.value)[0] for side in sides)
    return max((_most_edges(array.read, array.shape[0] - 1) for array in offsets), default=0)


def _most_edges(offsets: Callable[[int, int], npt.NDArray[np.signedinteger]], rows: int) -> int:
    """Return the largest difference of consecutive ``offsets``, in chunks of rows, as differences take as much memory
    as offsets."""
    starts = range(0, rows, _CHUNK_ROWS)
    return max((int(np.diff(offsets(at, min(rows, at + _CHUNK_ROWS) + 1)).max()) for at in starts), default=0)


def _row_scaling(
    store: Store, scaling: AnyScaling, into_rows: npt.NDArray[np.signedinteger], dtype: torch.dtype
) -> RowScaling:
    """Return the factors of the store's rows, whose in-edges (or out-edges) begin at ``into_rows`` [N+1]."""
    basic = scaling.basic
    if basic.plain:
        return _PLAIN
    n, fill = len(into_rows) - 1, basic.loop_weight
    counts_loops = fill is not None or basic in LAPLACIANS
    side = _in_edges_key(scaling).value if counts_loops and _count_self_loops(store, scaling) else None
    scale = _allocate_row_constants(n, dtype)
    own = _allocate_row_constants(n, dtype) if _has_own_factor(store, scaling) else None
    for start in range(0, n, _CHUNK_ROWS):
        stop = min(n, start + _CHUNK_ROWS)
        into = into_rows[start : stop + 1]
        degree, loop = (
            _sum_edge_weights(store, into, start, scaling)
            if basic.weighted
            else _count_degrees(store, side, into, start, self_term=fill is not None)
        )
        if basic in LAPLACIANS and not basic.weighted:  # setting self-loops to one adds one more than removing them
            loop = loop - 1
            degree = degree + loop
        if own is not None:
            own[start:stop, 0] = loop
        if basic.normalized:
            inverse = degree.to(dtype).pow(-1.0 if basic in RANDOM_WALKS else -0.5)
            scale[start:stop, 0] = inverse.masked_fill(degree == 0, 0.0)
        else:
            kind = torch.get_default_dtype() if basic is Scaling.MEAN_OF_ALL else dtype  # as PyG's ClusterGCNConv
            scale[start:stop, 0] = 1.0 / degree.clamp(min=1).to(kind)
    self_term = fill is not None or own is not None
    after = basic not in RANDOM_WALKS
    return RowScaling(scale, before=basic.normalized, after=after, self_term=self_term, self_N1=own)


def _allocate_row_constants(rows: int, dtype: torch.dtype) -> Tensor:
    """Return memory for one constant for each row [rows, 1]."""
    return torch.from_numpy(_allocate_on_own_pages(rows * dtype.itemsize)).view(dtype).view(rows, 1)


def _allocate_on_own_pages(nbytes: int) -> Bytes:
    """Return memory on pages of its own, since a device locks whole pages."""
    return Arena(nbytes).view(0, nbytes)


def _count_degrees(
    store: Store, loops_in: str | None, into_rows: npt.NDArray[np.signedinteger], start: int, *, self_term: bool
) -> tuple[Tensor, Tensor]:
    """Return the in-degrees [R] of the rows from ``start`` whose edges begin at ``into_rows`` [R+1], and the number of
    self-loops each lacks to have exactly one. With ``self_term``, all self-loops of a row count as one in its degree.
    ``loops_in``: a topology that has self-loops."""
    degree = torch.from_numpy(np.diff(into_rows).astype(np.int64))
    missing = torch.ones_like(degree)
    if loops_in is not None:
        loops = store.array(f"{loops_in}/self_loops").read(start, start + len(degree))
        missing -= torch.from_numpy(loops.astype(np.int64))
    return (degree + missing if self_term else degree), missing


def _sum_edge_weights(
    store: Store, into_rows: npt.NDArray[np.signedinteger], start: int, scaling: AnyScaling
) -> tuple[Tensor, Tensor]:
    """Return the sums of edge weights [R] of the rows from ``start``, whose edges begin at ``into_rows`` [R+1], as
    PyG's ``gcn_norm`` takes them, or its ``get_laplacian``, which ignores self-loops.

    Self-loops are added to rows without one as by ``add_remaining_self_loops``, if at all. If a row has several, PyG
    keeps the last one's weight, and so does this: a store has them in the order of the source. The second tensor [R] is
    the weight to add so that a row's self-loops count as that one. Both are float64. Raises ModelError for a sum below
    zero, which has no square root, and for a weight below zero in a Laplacian, whose largest entry PyG looks for.
    """
    rows, loop_weight, side = len(into_rows) - 1, scaling.basic.loop_weight, _degree_topology(store, scaling).value
    laplacian = scaling.basic in LAPLACIANS
    degree, loops = np.zeros(rows), np.zeros(rows)
    counts = np.full(rows, 0.0 if loop_weight is None else loop_weight)
    indices, weights = store.topology(side)[1], store.edge_weight(side)
    first, last = int(into_rows[0]), int(into_rows[-1])
    for low in range(first, last, _CHUNK_EDGES):
        high = min(last, low + _CHUNK_EDGES)
        of_row = np.repeat(np.arange(rows), np.diff(np.clip(into_rows, low, high)))
        weight = weights.read(low, high).astype(np.float64)
        if laplacian and weight.min() < 0:
            raise ModelError(f"some edge of {store.path} has a weight below 0: ChebConv takes others only")
        degree += np.bincount(of_row, weights=weight, minlength=rows)
        is_loop = indices.read(low, high) == of_row + start
        loops += np.bincount(of_row[is_loop], weights=weight[is_loop], minlength=rows)
        counts[of_row[is_loop]] = weight[is_loop]
    missing = -loops if laplacian else counts - loops if loop_weight is not None else np.zeros(rows)
    degree += missing
    if rows and degree.min() < 0:
        row = int(degree.argmin())
        raise ModelError(
            f"the weights of the edges into row {start + row} of {store.path} sum to {degree[row]:.6g}: GCN's "
            "normalisation is by their square root, and PyG gives NaN; use normalize=False or other weights"
        )
    return torch.from_numpy(degree), torch.from_numpy(missing)
