# SPDX-License-Identifier: Apache-2.0
"""The planner's input: the work of a model on a graph, before it is decided where any data is kept.

A model consists of local stages with aggregations between them. A ``Stage`` is one local stage: for every row it loads
rows of some matrices, pulls rows of others over the graph's edges (gathers and reduces them), and stores rows. The
planner turns each stage into one row pass, or into a column pass and a row pass if the pulled matrix does not fit into
memory.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from ooc.plan.layout.shuffle import GatheredRows

ALL_ROWS = 1 << 62
"""The value of ``Stage.rows_at_once`` for stages that need all rows of a tile together."""


class Fate(Enum):
    """Where a matrix waits between the pass that writes it and those that read it."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"
    RECOMPUTE = "recompute"


class Kind(Enum):
    """Which code writes a matrix, and how long its content lasts."""

    STORE = "store"
    """Part of the converted store: already on the SSD, read only."""
    CONSTANT = "constant"
    """Written once by the preparation, read by every epoch."""
    SCRATCH = "scratch"
    """Written and read again within every epoch."""
    BITS = "bits"
    """Like SCRATCH, but holds bits, eight in each one-byte column; never rounded and never pulled."""
    LEARNT = "learnt"
    """Rows of a learnt embedding: read by every epoch, and replaced by the last pass that reads them."""

    @property
    def lasts(self) -> bool:
        """Whether the content is still valid in the next epoch."""
        return self in (Kind.STORE, Kind.CONSTANT, Kind.LEARNT)


class Direction(Enum):
    """Which edges a pull goes along: a row's in-edges (forward), its out-edges (backward), or one of the following."""

    IN = "in"
    OUT = "out"
    FEATURES = "x"
    """Not edges of the graph: from a row to the columns in which its features are not zero, if only those are
    stored."""
    LINKS = "links"
    """Not edges of the graph: from the heads to the tails of the links whose loss is computed."""
    LINKS_REVERSED = "links reversed"
    """As ``LINKS``, from tails to heads."""
    SCORED_LINKS = "scored links"
    """Not edges of the graph: from the heads to the tails of the links that are scored."""
    SCORED_LINKS_REVERSED = "scored links reversed"
    """As ``SCORED_LINKS``, from tails to heads."""

    @property
    def of_edges(self) -> bool:
        """Whether these are the graph's own edges."""
        return self in (Direction.IN, Direction.OUT)

    @property
    def lasts(self) -> bool:
        """Whether the edges are the same in every step."""
        return self.of_edges or self is Direction.FEATURES


@dataclass(frozen=True, slots=True)
class RelationEdges:
    """The in-edges or out-edges of one edge type of a graph with several. ``folder`` is the edge type's name in the
    store.

    The rows are nodes of one type; their neighbours are nodes of the same or another type.
    """

    folder: str
    direction: Direction

    @property
    def value(self) -> str:
        """The name of this topology in the store, as for a ``Direction``."""
        return f"edges/{self.folder}/{self.direction.value}"

    @property
    def of_edges(self) -> bool:
        """True, as for a ``Direction`` of edges."""
        return True

    lasts = of_edges


EdgesKey = Direction | RelationEdges
"""The key of a topology. A graph with types has one for each edge type and direction."""


class EdgeData(Enum):
    """Data that an edge carries beside its two ends."""

    WEIGHT = "weight"
    FEATURES = "features"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of ``rows`` × ``columns`` values of ``itemsize`` bytes, with one row for each node of type ``space``
    ("": the graph has only one type)."""

    name: str
    rows: int
    columns: int
    itemsize: int
    kind: Kind
    space: str = ""

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.itemsize


@dataclass(frozen=True, slots=True)
class EdgeWork:
    """The work of a pull that computes something for every edge, beyond fetching rows; it determines how long the pull
    takes. Element-wise work is ``bytes_per_edge`` for each edge and slab, ``bytes_per_edge_and_head`` for each head in
    the slab, and ``bytes_per_row`` for all groups together. ``operators``: calls of operators for each tile, or for
    each run of an opaque layer. An opaque layer also has multiply-adds of dense products. The ``retainable`` figures
    are saved where the forward pass's recording is retained."""

    bytes_per_edge: int
    bytes_per_edge_and_head: int = 0
    bytes_per_row: int = 0
    operators: int = 0
    multiplies_per_edge: int = 0
    retainable_bytes_per_edge: int = 0
    retainable_operators: int = 0
    retainable_multiplies_per_edge: int = 0


@dataclass(frozen=True, slots=True)
class PerEdge:
    """How a pull that computes something for every edge, such as attention or a maximum, differs from a plain sum.

    Its columns come in ``groups`` that are independent of one another (the heads of an attention). Source, own rows and
    output all store group after group, so a slab of whole groups of the source gives a slab of the output, which has
    ``columns`` columns in all. ``own``: the matrix whose row a target needs beside its neighbours' rows (None: no such
    row, or the source's, of which a slab has all rows). ``beside``: a second such matrix.

    Temporaries of one call, for all groups together: ``bytes_per_edge`` for at most ``edges_at_once`` edges (or
    ``row_edges``, if a row's edges are needed together), ``bytes_per_row`` for each row, ``fixed_bytes`` however many
    groups there are, and ``held_bytes`` if a row's edges come in several pieces. If ``edges_at_once`` is 0, nothing is
    allocated for edges. ``slices``: how many successive groups are slices of one head; a slab with several of them
    computes an edge's weight once. ``work``: how long the work on edges takes (None: as long as streaming the
    temporaries of edges). ``as_kept``: the kernel reads source values in their stored precision.

    For opaque layers (``opaque``), a tile's rows are always computed together, so they are always cut into the same
    tiles. ``waiting_bytes_per_edge``: bytes of the gradients for neighbours that wait until they are added; a tile with
    more than ``waiting_edges`` edges computes them a second time instead. ``pads``: every row is padded to the longest,
    so rows run together should have about as many edges. ``apart``: target rows are of another matrix than the source,
    so none of them is a neighbour. ``together``: the reason, for messages, that a row's edges are needed at once.
    """

    groups: int
    columns: int
    own: str | None
    edges_at_once: int
    bytes_per_edge: int
    bytes_per_row: int
    opaque: bool = False
    row_edges: int = 0
    held_bytes: int = 0
    fixed_bytes: int = 0
    waiting_bytes_per_edge: int = 0
    waiting_edges: int = 1 << 62
    slices: int = 1
    work: EdgeWork | None = None
    beside: str | None = None
    as_kept: bool = False
    pads: bool = False
    apart: bool = False
    together: str = ""

    def heads(self, groups: int) -> int:
        """Return the number of heads that ``groups`` groups of a slab belong to."""
        return -(-groups // self.slices)

    def waiting_nbytes(self, edges: int, rows: int) -> int:
        """Return the bytes of gradients for neighbours that wait, for a tile with this many edges and rows."""
        return (min(edges, self.waiting_edges) + rows) * self.waiting_bytes_per_edge


@dataclass(frozen=True, slots=True)
class Parts:
    """How a device sums long rows: a row with more than ``edges`` edges is cut into stretches of at most that many.
    Each stretch takes ``bytes_each`` bytes of lists, and its sum goes into a workspace of ``itemsize`` bytes a column
    before the sums are added up."""

    edges: int
    itemsize: int
    bytes_each: int

    def nbytes(self, *, edges: int, columns: int) -> int:
        """Return a bound on the bytes needed beside the result, for rows that have ``edges`` edges together."""
        return 2 * (edges // self.edges) * (columns * self.itemsize + self.bytes_each)


@dataclass(frozen=True, slots=True)
class Pull:
    """``output[i] = Σ_j source[j]`` over the neighbours ``j`` of row ``i``, plus a self term if the model has one. With
    ``per_edge``, a kernel computes something else from the neighbours' rows. ``edge_data`` is read along with the
    edges; with weights the sum is ``Σ_j w_ij source[j]``. ``scattered``: a matrix to whose rows the kernel adds its
    results for the neighbours, tile after tile; it is in memory whole or spilled as partial sums
    (``ooc.plan.layout.shuffle``). ``kept``: the matrix in which the stage stores the pulled rows unchanged."""

    source: str
    output: str
    direction: EdgesKey
    per_edge: PerEdge | None = None
    edge_data: tuple[EdgeData, ...] = ()
    scattered: str | None = None
    kept: str | None = None

    @property
    def is_opaque(self) -> bool:
        """Whether it runs an opaque layer."""
        return self.per_edge is not None and self.per_edge.opaque

    @property
    def added_to(self) -> tuple[str, ...]:
        """The matrix that the pull scatters to, if any."""
        return () if self.scattered is None else (self.scattered,)

    @property
    def own(self) -> tuple[str, ...]:
        """The matrices whose own row a target needs beside its neighbours' rows."""
        kind = self.per_edge
        return () if kind is None else tuple(name for name in (kind.own, kind.beside) if name is not None)

    def output_columns(self, columns: int, of: int) -> int:
        """Return how many output columns come from ``columns`` columns, in whole groups, of a source that has ``of``
        columns."""
        return columns if self.per_edge is None else columns * self.per_edge.columns // of


@dataclass(frozen=True, slots=True)
class Stage:
    """One local stage over the first ``rows`` rows of nodes of type ``space``: it loads matrices, pulls at most one,
    and stores others.

    A loaded or pulled matrix may have fewer rows than the stage; gradients of missing rows are zero.
    ``scratch_bytes_per_row`` bounds the temporaries alive at once while a tile is computed. With ``entry_bytes``,
    sparse features are read as well; they take that much for each entry of a tile, and ``beside_bytes`` in all.
    ``multiplies_per_row``: multiply-adds of its dense products. ``streamed_bytes_per_row``: bytes that its element-wise
    work reads and writes, loads and stores included (0: unknown, estimated from loads and stores). ``operators``:
    operators called for a tile, however few rows it has. ``rows_at_once``: if rows are independent and nothing is
    summed over them, at most this many are computed at a time.
    """

    name: str
    rows: int
    loads: tuple[str, ...]
    pull: Pull | None
    stores: tuple[str, ...]
    scratch_bytes_per_row: int
    reverse: bool = False
    multiplies_per_row: int = 0
    streamed_bytes_per_row: int = 0
    operators: int = 0
    entry_bytes: int = 0
    beside_bytes: int = 0
    rows_at_once: int = ALL_ROWS
    space: str = ""

    @property
    def writes(self) -> tuple[str, ...]:
        """All matrices that the stage writes."""
        return self.stores if self.pull is None else (*self.stores, *self.pull.added_to)


@dataclass(frozen=True, slots=True)
class Kept:
    """The ``matrices`` that forward stage number ``stage`` keeps for the backward pass.

    ``recomputable``: another workload exists in which the backward pass recomputes all of them.
    """

    stage: int
    matrices: tuple[str, ...]
    recomputable: bool


@dataclass(frozen=True, slots=True)
class EdgeArray:
    """``columns`` values of ``itemsize`` bytes for every edge, in the order of one direction's edges."""

    columns: int
    itemsize: int

    @property
    def edge_bytes(self) -> int:
        return self.columns * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """The edges of one direction. ``tile_edges[i]`` is the number of edges of tiles 0…i-1 (a coarse indptr). ``data``:
    arrays that are read along with the edges. ``halo``: with several processes, the rows of other processes that this
    one's in-edges lead to, ascending (None: any row). ``halo_rows``: an upper bound for the length of ``halo``, over
    all processes, before it is known."""

    direction: EdgesKey
    index_itemsize: int
    tile_edges: Sequence[int]
    data: Mapping[EdgeData, EdgeArray] = field(default_factory=dict)
    halo: Sequence[int] | None = None
    halo_rows: int | None = None

    @property
    def edges(self) -> int:
        return self.tile_edges[-1]

    @property
    def arrays(self) -> dict[EdgeData | None, EdgeArray]:
        """All arrays that are read of the edges; the key None stands for their indices."""
        indices: dict[EdgeData | None, EdgeArray] = {None: EdgeArray(1, self.index_itemsize)}
        return indices | dict(self.data)

    def edges_of(self, rows: range, tile_rows: int) -> int:
        """Return the number of edges of ``rows``, rounded to whole tiles."""
        last = len(self.tile_edges) - 1
        return self.tile_edges[min(last, -(-rows.stop // tile_rows))] - self.tile_edges[rows.start // tile_rows]

    def edge_bytes(self, data: Collection[EdgeData]) -> int:
        """Return the bytes of one edge with ``data``."""
        return self.index_itemsize + sum(self.data[kind].edge_bytes for kind in data)


@dataclass(frozen=True, slots=True, eq=False)
class Bucketing:
    """How sources can be shuffled to the rows that gather them (``ooc.plan.layout.shuffle``): along the edges of
    ``direction``, out of every row. ``gathered`` counts the rows, when it is first asked. ``exact``: the count is
    exact; for links, which are drawn anew for every step, it is an upper bound. ``gathers_own``: the gathering rows are
    sources, too, and also gather their own rows."""

    direction: EdgesKey
    gathered: GatheredRows
    exact: bool = True
    gathers_own: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """The rows that process ``rank`` computes: a contiguous range of the nodes of each type. ``every``: the ranges of
    all processes, by type."""

    rank: int
    every: Mapping[str, Sequence[range]]

    @property
    def count(self) -> int:
        """The number of processes."""
        return max(map(len, self.every.values()))

    @property
    def rows(self) -> dict[str, range]:
        """The ranges of this process, by type."""
        return {space: some[self.rank] for space, some in self.every.items()}

    def own(self, space: str, rows: int) -> range:
        """Return the range of this process among the first ``rows`` rows of a type."""
        return self.of(self.rank, space, rows)

    def of(self, rank: int, space: str, rows: int) -> range:
        """Return the range of process ``rank`` (modulo the number of processes) among the first ``rows`` rows of a
        type."""
        some = self.every[space]
        share = some[rank % len(some)]
        return range(min(rows, share.start), min(rows, share.stop))

    def in_turn(self, space: str, rows: int) -> list[range]:
        """Return all processes' ranges of the first ``rows`` rows, in the order in which this process pulls for them:
        the next process first, its own rows last. So each process receives from one other at a time."""
        return [self.of(self.rank + by, space, rows) for by in range(1, self.count + 1)]

    def __len__(self) -> int:
        """Return the number of this process's rows, over all types."""
        return sum(map(len, self.rows.values()))


@dataclass(frozen=True)
class Workload:
    """Everything the planner needs to know of a model on a graph.

    ``programs``: the sequences of stages, in the order they may run: ``prepare`` once, then ``train`` and ``evaluate``
    any number of times. ``fixed_host_bytes`` and ``fixed_device_bytes``: memory that is always taken (row offsets and
    scalings; parameters, their gradients and the optimizer's state). ``threads`` tiles are computed at once, in
    ``dtype``; at most ``tasks_ahead`` are running or waiting, or one for each thread. ``kept``: the matrices that wait
    for the backward pass, in the order of the forward stages. ``recomputed``: matrices that the backward pass computes
    again instead.

    Kernels read values of ``pulled_itemsize`` bytes; with ``sums_as_kept``, plain sums read values in their stored
    precision. ``scatter_counts``: for each matrix that a pull scatters to, how often something is added to the rows of
    tiles 0…i-1; a matrix without counts can only be in memory whole. ``parts``: how long rows are summed, where that
    takes memory. ``bucketing``: by direction, how the sources of opaque layers can be shuffled; without it they can
    only be in memory whole. ``share``: the rows that this process computes (None: all). ``state_bytes``: optimizer
    state that a step reads from the SSD and writes back. ``line_bytes``: rows that plain sums pull from memory are best
    a multiple of this (1: any). ``may_round``: whether what waits between passes may be rounded to a narrower type.
    """

    rows: int
    tile_rows: int
    matrices: dict[str, Matrix]
    programs: dict[str, tuple[Stage, ...]]
    topologies: dict[EdgesKey, Topology]
    fixed_host_bytes: int
    fixed_device_bytes: int
    pulled_itemsize: int
    threads: int
    tasks_ahead: int = 1
    sums_as_kept: bool = False
    dtype: str = "float32"
    recomputed: tuple[Matrix, ...] = ()
    kept: tuple[Kept, ...] = ()
    scatter_counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parts: Parts | None = None
    bucketing: Mapping[EdgesKey, Bucketing] = field(default_factory=dict)
    share: Share | None = None
    state_bytes: int = 0
    line_bytes: int = 1
    may_round: bool = True
    leanest: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Layouts with the least memory found so far; they do not depend on budgets."""

    def own(self, space: str, rows: int) -> range:
        """Return the range that this process computes among the first ``rows`` rows of a type."""
        return range(rows) if self.share is None else self.share.own(space, rows)

    @property
    def part_edges(self) -> int:
        """A row's edges may be cut at multiples of this, counted from the row's first edge."""
        return 1 if self.parts is None else self.parts.edges

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages of all programs."""
        return tuple(chain(*self.programs.values()))

    @cached_property
    def pulls(self) -> tuple[Pull, ...]:
        """All pulls of all programs."""
        return tuple(stage.pull for stage in self.stages if stage.pull)

    @cached_property
    def tile_bytes(self) -> int:
        """The least bytes in which all threads can each compute a tile of rows."""
        tiles = (min(one.rows, self.tile_rows, one.rows_at_once) * one.scratch_bytes_per_row for one in self.stages)
        return self.threads * max(tiles, default=0)

    @cached_property
    def shardable(self) -> frozenset[str]:
        """The matrices whose slabs can be sharded among the processes, each of which then pulls its own slabs for all
        rows. A matrix qualifies if it is pulled over edges, by no opaque layer, and if the program itself writes it,
        and all own rows of the pull, beforehand."""
        found = {pull.source for pull in self.pulls}
        for stage in self.stages:
            if (pull := stage.pull) is not None:
                brought = [self.matrices[name] for name in pull.own]
                scratch = all(one.kind is Kind.SCRATCH for one in (self.matrices[pull.source], *brought))
                written = scratch and all(one.rows >= stage.rows for one in brought)
                if not written or not pull.direction.of_edges or pull.is_opaque:
                    found.discard(pull.source)
        return frozenset(name for name in found if processes_of(self.share) > 1 and self.sharded_widths(name))

    def sharded_widths(self, name: str) -> tuple[int, ...]:
        """Return the widths of slabs of matrix ``name``, widest first, with which all processes have equally many
        slabs."""
        columns, kind = self.matrices[name].columns, self.groupings.get(name)
        groups, slices = (columns, 1) if kind is None else (kind.groups, kind.slices)
        return tuple(columns // groups * some for some in sharded_widths(groups, processes_of(self.share), slices))

    @cached_property
    def groupings(self) -> dict[str, PerEdge]:
        """How the columns of a matrix are grouped, for each matrix that some pull does not just sum."""
        return {pull.source: pull.per_edge for pull in self.pulls if pull.per_edge}


def results_at_once(threads: int, tasks_ahead: int) -> int:
    """Return how many tiles' results exist at once before they are added up, those being computed included."""
    return 1 if threads == 1 else max(threads, tasks_ahead) + 1


def processes_of(share: Share | None) -> int:
    """Return the number of processes."""
    return 1 if share is None else share.count


@lru_cache(maxsize=64)
def sharded_widths(groups: int, count: int, slices: int = 1) -> tuple[int, ...]:
    """Return the widths of slabs, in groups of columns and widest first, with which ``count`` processes have equally
    many slabs. A slab has whole heads of ``slices`` groups each, or an equal part of one head."""
    fitting = (width for width in range(-(-groups // count), 0, -1) if width % slices == 0 or slices % width == 0)
    narrowest = {-(-groups // width): width for width in fitting}
    return tuple(width for slabs, width in narrowest.items() if slabs % count == 0)
