# SPDX-License-Identifier: Apache-2.0
"""What an aggregation knows of every row: where its edges start, how it is scaled, whether it counts itself.

GCN's and mean's coefficients factor into a scaling of rows before and after a plain sum, so the topology on
disk is column indices only:

    gcn   D^-1/2 (A + I) D^-1/2 M      mean   D^-1 A M      sum   A M

Where edges have weights, A is a matrix of these, the sum a weighted one, and I what self-loops weigh.
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
    """How neighbours are weighted."""

    SUM = "sum"
    MEAN = "mean"
    MEAN_OF_ALL = "mean with self-loops"
    GCN = "gcn"
    GCN_NO_LOOPS = "gcn without self-loops"
    LAPLACIAN = "laplacian"
    """As its off-diagonal: by out-degrees, and as if there were no self-loops."""
    RANDOM_WALK = "random walk"
    """The same, divided by the out-degree of the source instead of the roots of both ends'."""
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
        """Whatever edges it is over."""
        return self

    @property
    def label(self) -> str:
        """What matrices that are summed so are called by."""
        return self.name.lower()

    @property
    def reversed(self) -> bool:
        """Over out-neighbours, and by out-degrees."""
        return self.name.startswith("REVERSED")

    @property
    def weighted(self) -> bool:
        """By the weights of the store's edges."""
        return self.value.startswith("weighted")

    @property
    def normalized(self) -> bool:
        """By the degrees of both ends, before and after the sum, or of the sources alone."""
        return not self.plain and self not in (Scaling.MEAN, Scaling.MEAN_OF_ALL, Scaling.REVERSED_MEAN)

    @property
    def within_a_type(self) -> bool:
        """Whether it scales both ends of edges, or adds self-loops, so that these are of one type."""
        return self.normalized or self.loop_weight is not None

    @property
    def loop_weight(self) -> float | None:
        """What a self-loop weighs that is added to a row without one; None: none is added."""
        return _LOOP_WEIGHTS.get(self)

    @property
    def may_vanish(self) -> bool:
        """Whether a row may be scaled with 0: without self-loops there are rows without edges, and weights may be 0."""
        return self in _VANISHING or (self.weighted and self.normalized)

    @property
    def plain(self) -> bool:
        """Whether nothing is scaled."""
        return self in (Scaling.SUM, Scaling.WEIGHTED_SUM, Scaling.REVERSED_SUM)

    def against_the_edges(self) -> "Scaling | None":
        """The same over neighbours at the other end; None where there is none."""
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
_VANISHING = (Scaling.GCN_NO_LOOPS, *LAPLACIANS, Scaling.REVERSED_GCN_NO_LOOPS)


@dataclass(frozen=True, slots=True)
class RelationScaling:
    """``basic`` of sums over the edges of one type, by their own degrees; of nodes of two types a sum or a mean.
    Attention and the like count as sums."""

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
    """The types of the nodes that are summed, and of those that get the sums; "" where there is but one."""
    relation = scaling.relation if isinstance(scaling, RelationScaling) else None
    return ends_of_edges(relation, flipped=scaling.basic.reversed)


def ends_of_edges(relation: EdgeType | None, *, flipped: bool) -> tuple[str, str]:
    """The types of nodes that edges lead from and to, taken as they are or the other way round; "" of all edges."""
    source, target = ("", "") if relation is None else (relation.source, relation.target)
    return (target, source) if flipped else (source, target)


@dataclass(frozen=True, slots=True)
class RowScaling:
    """What one scaling does to every row, in host memory: ``scale_N1`` and ``self_N1`` in the compute dtype. They go to
    a device tile by tile.

    ``before``: rows are scaled before the sum, ``after``: and behind it. ``self_term``: every row counts itself once;
    ``self_N1`` then holds what its self-loop weighs minus the self-loops already among its edges, ``None`` where that
    is 1 everywhere.
    """

    scale_N1: Tensor | None = None
    before: bool = False
    after: bool = True
    self_term: bool = False
    self_N1: Tensor | None = None

    def own(self, rows: slice, source: Tensor) -> Own:
        """What these rows are multiplied by as summands of their own, where ``source`` is."""
        if not self.self_term:
            return None
        return 1.0 if self.self_N1 is None else self.self_N1[rows].to(source.device, non_blocking=True)

    def scale(self, start: int, rows_RC: Tensor) -> Tensor | None:
        """[R, 1] factors after the sum for rows from ``start`` on, where these are; ``None`` for a plain sum."""
        if self.scale_N1 is None:
            return None
        return self.scale_N1[start : start + rows_RC.shape[0]].to(rows_RC.device, non_blocking=True)


_PLAIN = RowScaling()


@dataclass(slots=True)
class GraphRows:
    """Constants of rows in host memory: ``offsets`` [N+1] by topology, and what each scaling of the model needs; for
    the kernels of a device with memory of its own, ``parts`` of long rows [P, 2] (``kernels.cuda.segments``)."""

    offsets: dict[EdgesKey, npt.NDArray[np.signedinteger]] = field(default_factory=dict)
    parts: dict[EdgesKey, npt.NDArray[np.signedinteger]] = field(default_factory=dict)
    scalings: Mapping[AnyScaling, RowScaling] = field(default_factory=dict)

    def memory(self) -> Iterator[Bytes]:
        """Where it lies, on pages of its own: tiles' parts of it are brought to a device."""
        yield from (offsets.view(np.uint8) for offsets in self.offsets.values())
        yield from (parts_P2.reshape(-1).view(np.uint8) for parts_P2 in self.parts.values() if len(parts_P2))
        for scaling in self.scalings.values():
            for constants_N1 in (scaling.scale_N1, scaling.self_N1):
                if constants_N1 is not None:
                    yield constants_N1.view(-1).view(torch.uint8).numpy()

    def scaled(self, scaling: AnyScaling) -> RowScaling:
        """What ``scaling`` does to rows; nothing where nothing is known of it."""
        return self.scalings.get(scaling, _PLAIN)

    def most_edges(self, direction: EdgesKey) -> int:
        """The most edges of any row, 0 where nothing is known of them."""
        offsets = self.offsets.get(direction, np.zeros(1, dtype=np.int64))
        return _most_edges(lambda start, stop: offsets[start:stop], len(offsets) - 1)


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """How many leading rows a stage must compute: element d is for what lies d hops before the scored rows.

    ``training`` counts from the rows of the loss, ``scoring`` from those of any split; both have one element
    more than the network has layers, and never shrink. Every in-neighbour of the rows of one element is among
    those of the next. Without an order by hops all are ``nodes``. ``others``: of a graph with types, by type; the rest
    is that of the type that is scored.
    """

    nodes: int
    training: tuple[int, ...]
    scoring: tuple[int, ...]
    others: Mapping[str, "ActiveRows"] = field(default_factory=dict)

    def of(self, space: str) -> "ActiveRows":
        """Those of nodes of type ``space``, "" where there is but one."""
        return self.others.get(space, self)

    def training_rows(self, hops: int) -> int:
        """Rows within ``hops`` of those of the loss; all where the network reaches farther than this was made for."""
        return self.training[hops] if hops < len(self.training) else self.nodes

    def scoring_rows(self, hops: int) -> int:
        """Rows within ``hops`` of those of any split; all where the network reaches farther than this was made for."""
        return self.scoring[hops] if hops < len(self.scoring) else self.nodes

    @classmethod
    def everything(cls, nodes: int, depth: int) -> "ActiveRows":
        """Nothing is left out."""
        return cls(nodes, (nodes,) * (depth + 1), (nodes,) * (depth + 1))

    @classmethod
    def of_store(cls, store: Store, depth: int, *, everything: bool = False) -> "ActiveRows":
        """What a store in hop order lets one leave out, by the counts it was written with; nothing in any other, or if
        it is to be ``everything``."""
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
    """The error for a store whose ``array`` cannot be what was written."""
    return StoreError(f"{array} of the store {store.path} is damaged; ooc verify tells where; convert again")


def directions(store: Store) -> tuple[Direction, ...]:
    """The distinct topologies of a store: an undirected one is its own transpose."""
    return (Direction.IN,) if store.undirected else (Direction.IN, Direction.OUT)


_OF_GRAPHS = (Direction.IN, Direction.OUT, Direction.FEATURES)


def _swept(store: Store) -> tuple[Direction, ...]:
    """The same, features that are kept without their zeros, and links; of a graph with types links alone."""
    links = [side for side in Direction if side not in _OF_GRAPHS and store.has(f"{side.value}/indptr")]
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
    """The direction in which the same edges, or links, are known from their other ends; None where they are not."""
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
    return side if store.types is None and side in _swept(store) else None


def topologies(store: Store, scalings: Collection[AnyScaling]) -> list[EdgesKey]:
    """All that a network whose sums are scaled so may pull over: of a graph with types, over its own edge types."""
    relations = dict.fromkeys(s.relation for s in scalings if isinstance(s, RelationScaling))
    edges = [RelationEdges(one.folder, side) for one in relations for side in (Direction.IN, Direction.OUT)]
    return [*edges, *_swept(store)]


def offset_itemsize(store: Store) -> int:
    of_types = [] if store.types is None else store.types.edges.values()
    most = max([*of_types, *(store.topology(side.value)[1].shape[0] for side in _swept(store))])
    return 4 if most < 2**31 else 8


def rows_nbytes(store: Store, scalings: Collection[AnyScaling], itemsize: int, *, on_device: bool) -> int:
    """Host bytes that ``load_rows`` will take, for admission beforehand; a bound, where there may be long rows."""
    places = constants = 0
    for side in topologies(store, scalings):
        indptr, indices = store.topology(side.value)
        places += indptr.shape[0] + 2 * on_device * most_parts(indices.shape[0])
    for scaling in scalings:
        rows = store.num_nodes if store.types is None else store.types.nodes[ends_of(scaling)[1]]
        constants += rows * ((not scaling.basic.plain) + _counts_own(store, scaling))
    return places * offset_itemsize(store) + constants * itemsize


def _counts_own(store: Store, scaling: AnyScaling) -> bool:
    """Whether what a row's self-loop adds differs from row to row, or from 1."""
    weight = 1.0 if scaling.basic in LAPLACIANS else scaling.basic.loop_weight
    return weight is not None and (_self_loops(store, scaling) > 0 or weight != 1.0)


def _self_loops(store: Store, scaling: AnyScaling) -> int:
    """StoreError where nobody has counted them."""
    side = _in_edges(scaling).value
    found = store.self_loops(side)
    if found is None:
        raise StoreError(f"{store.path} does not say how many self-loops {side} has; convert again")
    return found


def _in_edges(scaling: AnyScaling) -> EdgesKey:
    if isinstance(scaling, RelationScaling):
        return RelationEdges(scaling.relation.folder, Direction.IN)
    return Direction.IN


def load_rows(store: Store, scalings: Collection[AnyScaling], dtype: torch.dtype, *, on_device: bool) -> GraphRows:
    """Read offsets and derive ``scalings``, in chunks of rows so that nothing larger than the result is held.
    ``on_device``: and list the parts of long rows."""
    offsets = {side: load_offsets(store, side) for side in topologies(store, scalings)}
    parts = {direction: _parts(stops) for direction, stops in offsets.items()} if on_device else {}
    found = {scaling: _row_scaling(store, scaling, offsets[_counted_by(store, scaling)], dtype) for scaling in scalings}
    return GraphRows(offsets, parts, found)


def _counted_by(store: Store, scaling: AnyScaling) -> EdgesKey:
    """The topology whose degrees it goes by."""
    by_out_degrees = scaling.basic.reversed or scaling.basic in LAPLACIANS
    if isinstance(scaling, RelationScaling):
        return RelationEdges(scaling.relation.folder, Direction.OUT if by_out_degrees else Direction.IN)
    return directions(store)[-1] if by_out_degrees else Direction.IN


def _parts(offsets: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    chunks = [
        long_parts(offsets[start : start + _CHUNK_ROWS + 1], start)
        for start in range(0, max(1, len(offsets) - 1), _CHUNK_ROWS)
    ]
    count = sum(map(len, chunks))
    if not count:
        return chunks[0]
    parts_P2 = _on_own_pages(2 * count * offsets.itemsize).view(offsets.dtype).reshape(count, 2)
    return np.concatenate(chunks, out=parts_P2)


def load_offsets(store: Store, direction: EdgesKey) -> npt.NDArray[np.signedinteger]:
    """Where every row's edges begin, and the last one's end [N+1]."""
    indptr, indices = store.topology(direction.value)
    n, offset_type = indptr.shape[0] - 1, np.dtype(f"i{offset_itemsize(store)}")
    rows: npt.NDArray[np.signedinteger] = _on_own_pages((n + 1) * offset_type.itemsize).view(offset_type)
    for start in range(0, n + 1, _CHUNK_ROWS):
        stop = min(n + 1, start + _CHUNK_ROWS)
        rows[start:stop] = indptr.read(start, stop)
        before = max(0, start - 1)
        if (np.diff(rows[before:stop]) < 0).any() or rows[0] != 0 or rows[start:stop].max() > indices.shape[0]:
            raise damaged(store, indptr.name)
    if rows[n] != indices.shape[0]:
        raise damaged(store, indptr.name)
    return rows


def most_joined(store: Store) -> float:
    """Edges, or links of a step, of which there are most, by rows. (Those that are scored leave nothing behind.) Of a
    graph with types links alone."""
    found = [store.topology(side.value) for side in _swept(store) if side.of_edges or side is Direction.LINKS]
    return max((indices.shape[0] / (indptr.shape[0] - 1) for indptr, indices in found), default=0.0)


def most_edges(store: Store, relation: EdgeType | None = None) -> int:
    """The most edges or links of any row, before offsets are loaded; of a graph with types links, or edges of one."""
    known = Direction.IN, Direction.OUT, Direction.LINKS, Direction.SCORED_LINKS
    if relation is not None:
        sides: Sequence[EdgesKey] = [RelationEdges(relation.folder, side) for side in (Direction.IN, Direction.OUT)]
    else:
        sides = [side for side in _swept(store) if side in known]
    offsets = (store.topology(side.value)[0] for side in sides)
    return max((_most_edges(array.read, array.shape[0] - 1) for array in offsets), default=0)


def _most_edges(offsets: Callable[[int, int], npt.NDArray[np.signedinteger]], rows: int) -> int:
    """In chunks of rows, as differences are as large as the offsets, which ``offsets`` gives from one to another."""
    starts = range(0, rows, _CHUNK_ROWS)
    return max((int(np.diff(offsets(at, min(rows, at + _CHUNK_ROWS) + 1)).max()) for at in starts), default=0)


def _row_scaling(
    store: Store, scaling: AnyScaling, into_rows: npt.NDArray[np.signedinteger], dtype: torch.dtype
) -> RowScaling:
    """What ``scaling`` does to the store's rows, whose in-edges (or out-edges) begin at ``into_rows``
    [N+1]."""
    basic = scaling.basic
    if basic.plain:
        return _PLAIN
    n, fill = len(into_rows) - 1, basic.loop_weight
    counts_loops = fill is not None or basic in LAPLACIANS
    side = _in_edges(scaling).value if counts_loops and _self_loops(store, scaling) else None
    scale = _row_constants(n, dtype)
    own = _row_constants(n, dtype) if _counts_own(store, scaling) else None
    for start in range(0, n, _CHUNK_ROWS):
        stop = min(n, start + _CHUNK_ROWS)
        into = into_rows[start : stop + 1]
        degree, loop = (
            _weighted_degrees(store, into, start, scaling)
            if basic.weighted
            else _degrees(store, side, into, start, self_term=fill is not None)
        )
        if basic in LAPLACIANS and not basic.weighted:  # to make self-loops one takes one more than to make them none
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


def _row_constants(rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, 1]."""
    return torch.from_numpy(_on_own_pages(rows * dtype.itemsize)).view(dtype).view(rows, 1)


def _on_own_pages(nbytes: int) -> Bytes:
    """Memory whose pages nothing else lies on, as a device locks whole ones."""
    return Arena(nbytes).view(0, nbytes)


def _degrees(
    store: Store, loops_in: str | None, into_rows: npt.NDArray[np.signedinteger], start: int, *, self_term: bool
) -> tuple[Tensor, Tensor]:
    """In-degrees [R] of the rows from ``start`` whose edges begin at ``into_rows`` [R+1], with ``self_term`` one for
    all their self-loops together; and what it takes to make these one. ``loops_in``: the topology that has some."""
    degree = torch.from_numpy(np.diff(into_rows).astype(np.int64))
    missing = torch.ones_like(degree)
    if loops_in is not None:
        loops = store.array(f"{loops_in}/self_loops").read(start, start + len(degree))
        missing -= torch.from_numpy(loops.astype(np.int64))
    return (degree + missing if self_term else degree), missing


def _weighted_degrees(
    store: Store, into_rows: npt.NDArray[np.signedinteger], start: int, scaling: AnyScaling
) -> tuple[Tensor, Tensor]:
    """Sums of the weights of the edges [R] of the rows from ``start``, which begin at ``into_rows`` [R+1], as PyG's
    ``gcn_norm`` takes them, or its ``get_laplacian``, to which self-loops are none.

    Self-loops are added to rows without one as by ``add_remaining_self_loops``, if at all. Where a row has several, PyG
    keeps the last one's weight, and so does this: a store has them in the order of the source. The second tensor [R] is
    what makes of a row's self-loops the one that counts. Both in float64. Raises ModelError for a sum below zero, which
    has no square root, and for a weight below zero in a Laplacian, whose largest entry PyG looks for.
    """
    rows, loop_weight, side = len(into_rows) - 1, scaling.basic.loop_weight, _counted_by(store, scaling).value
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
