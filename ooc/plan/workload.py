# SPDX-License-Identifier: Apache-2.0
"""What is to be done, before anybody has decided where anything is kept.

A model is local stages with aggregations between them. A ``Stage`` is one local stage: for every row it
loads rows of some matrices, pulls rows of others over the graph's edges, and stores rows. The planner turns
each stage into one row pass, or into a column pass and a row pass where the pulled matrix does not fit.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from ooc.plan.layout.shuffle import GatheredRows

ALL_ROWS = 1 << 62
"""That a stage computes at a time where it takes those of a tile together."""


class Fate(Enum):
    """Where a matrix waits between its writer and its readers."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"
    RECOMPUTE = "recompute"


class Kind(Enum):
    """Who writes a matrix, and how long it lasts."""

    STORE = "store"
    """Part of the converted store: on the SSD already, read only."""
    CONSTANT = "constant"
    """Written once by the preparation, read by every epoch."""
    SCRATCH = "scratch"
    """Written and read again within every epoch."""
    BITS = "bits"
    """The same, holding bits, eight in each of its columns of one byte: never rounded, never pulled."""
    LEARNT = "learnt"
    """Read by every epoch and replaced by the last pass that reads it: as the SSD has it until then, and again when it
    ends."""

    @property
    def lasts(self) -> bool:
        """Whether it is still there in the next epoch."""
        return self in (Kind.STORE, Kind.CONSTANT, Kind.LEARNT)


class Direction(Enum):
    """Whose neighbours are summed: over a row's in-edges (forward) or its out-edges (backward)."""

    IN = "in"
    OUT = "out"
    FEATURES = "x"
    """None of the graph: from a row to the columns where its features are not zero, if the others are not kept."""
    LINKS = "links"
    """None of the graph's edges, but the links whose losses are taken: from their heads to their tails."""
    LINKS_REVERSED = "links reversed"
    """The same from their tails to their heads."""
    SCORED_LINKS = "scored links"
    """None of the graph's edges, but the links that are scored: from their heads to their tails."""
    SCORED_LINKS_REVERSED = "scored links reversed"
    """The same from their tails to their heads."""

    @property
    def of_edges(self) -> bool:
        """Whether it is the graph's own edges."""
        return self in (Direction.IN, Direction.OUT)

    @property
    def lasts(self) -> bool:
        """Whether it is the same in every step."""
        return self.of_edges or self is Direction.FEATURES


@dataclass(frozen=True, slots=True)
class RelationEdges:
    """The edges of one type of a graph with several, over in-edges or out-edges: ``folder`` is the store's name of it.

    Its rows are nodes of one type, its neighbours of the same or another one."""

    folder: str
    direction: Direction

    @property
    def value(self) -> str:
        """As of a ``Direction``: what the store calls this topology."""
        return f"edges/{self.folder}/{self.direction.value}"

    @property
    def of_edges(self) -> bool:
        """As of a ``Direction``: these are edges."""
        return True

    lasts = of_edges


EdgesKey = Direction | RelationEdges
"""Which topology: of a graph with types each edge type has its own ones."""


class EdgeData(Enum):
    """What edges carry beside their two ends."""

    WEIGHT = "weight"
    FEATURES = "features"


@dataclass(frozen=True, slots=True)
class Matrix:
    """``rows`` × ``columns`` values of ``itemsize`` bytes, one row a node, of type ``space`` ("": there is but one)."""

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
    """What a pull that computes something for every edge takes beside fetching, by how long it takes: so many bytes of
    element-wise work for every edge of a slab, ``bytes_per_edge_and_head`` for each head in it besides, and
    ``bytes_per_row`` of all groups together; of an opaque layer multiply-adds of its dense products; and so many
    ``operators`` a tile, of an opaque layer each time that it is run. So much of these is spared where what the layer
    has recorded before is retained."""

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
    """What sets a pull apart that computes something for every edge, as attention and maxima do, from a plain sum.

    Its columns come in ``groups`` that know nothing of one another (the heads of an attention). Source, own rows and
    output all lie group after group, so that a slab of whole groups of the source gives one of the output, of
    ``columns`` columns in all. ``own``: the matrix of which a row needs its own row beside what it pulls; None: none,
    or that of the source, of which a slab has all rows. ``beside``: one more such matrix. Temporaries of one call, all
    groups together, are ``bytes_per_edge`` for at most ``edges_at_once`` edges (or ``row_edges``, of a row whose edges
    are taken together) and every row, and ``bytes_per_row``; ``fixed_bytes`` besides, however many groups there are,
    and ``held_bytes`` where a row's edges come in several pieces. Without ``edges_at_once`` nothing is made for an
    edge. ``opaque``: what an opaque layer makes of a tile's rows, all together, so that they are always cut
    into the same tiles; ``waiting_bytes_per_edge``: of what it finds for other rows of each tile, until that is added
    to them; of a tile with more than ``waiting_edges`` nothing waits: it is computed once more while it is added.
    ``slices``: how many groups, from the first on, are slices of one head: where a slab has several of them, what is
    computed for an edge is computed once. ``work``: how long that takes (None: as to stream the temporaries of edges).
    ``as_kept``: it takes the source's values as they are kept, however narrow. ``pads``: rows that are run together
    have to be of about as many edges, since all have room for those of any. ``apart``: rows that pull are of another
    matrix than the source, so that none of them is a neighbour. ``together``: what needs a row's edges at once.
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
        """How many heads ``groups`` are slices of, in a slab."""
        return -(-groups // self.slices)

    def waiting_nbytes(self, edges: int, rows: int) -> int:
        """Of what is found for other rows, of a tile of so many rows and edges."""
        return (min(edges, self.waiting_edges) + rows) * self.waiting_bytes_per_edge


@dataclass(frozen=True, slots=True)
class Parts:
    """How a device makes plain sums: rows with more than ``edges`` edges in stretches of at most so many, of which it
    has ``bytes_each`` of lists, and that go into a workspace of ``itemsize`` bytes a column, then are added up."""

    edges: int
    itemsize: int
    bytes_each: int

    def nbytes(self, *, edges: int, columns: int) -> int:
        """A bound on what it takes beside the result for rows with so many edges together."""
        return 2 * (edges // self.edges) * (columns * self.itemsize + self.bytes_each)


@dataclass(frozen=True, slots=True)
class Pull:
    """``output[i] = Σ_j source[j]`` over the neighbours ``j`` of row ``i``, plus a self term if the model has one; or,
    with ``per_edge``, what a kernel makes of the neighbours' rows. ``edge_data`` is read along with the edges: with
    weights it is ``Σ_j w_ij source[j]``. ``scattered``: a matrix, in memory whole or spilled as partial sums
    (``ooc.plan.layout.shuffle``), to whose rows the kernel adds what it finds for the neighbours, tile after tile.
    ``kept``: the matrix that the stage stores what it has pulled in, just as it is."""

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
        """The matrix that it scatters to, if there is one."""
        return () if self.scattered is None else (self.scattered,)

    @property
    def own(self) -> tuple[str, ...]:
        """The matrices of which a row needs its own row beside what it pulls."""
        kind = self.per_edge
        return () if kind is None else tuple(name for name in (kind.own, kind.beside) if name is not None)

    def output_columns(self, columns: int, of: int) -> int:
        """Columns of the output that ``columns`` of the source's ``of`` columns, whole groups, give."""
        return columns if self.per_edge is None else columns * self.per_edge.columns // of


@dataclass(frozen=True, slots=True)
class Stage:
    """One local stage over the first ``rows`` rows of nodes of type ``space``: ``loads`` and at most one ``pull`` in,
    ``stores`` out.

    A loaded or pulled matrix may have fewer rows than the stage: gradients of rows that are not there are zero.
    ``scratch_bytes_per_row`` bounds the temporaries alive at once while a tile of rows is computed; with
    ``entry_bytes`` features without their zeros come in, too, and take so much for each entry of a tile and
    ``beside_bytes``. ``multiplies_per_row`` are the multiply-adds of its dense products, ``streamed_bytes_per_row``
    what its element-wise work reads and writes in memory, loads and stores included (0: not known; then loads and
    stores stand for it), and ``operators`` how many operators run on a tile, however few rows it has. Where rows are
    nothing to one another, and nothing is summed over them, no more than ``rows_at_once`` are computed at a time.
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
        """All matrices that it writes."""
        return self.stores if self.pull is None else (*self.stores, *self.pull.added_to)


@dataclass(frozen=True, slots=True)
class Kept:
    """What forward stage number ``stage`` keeps for the backward pass: ``matrices``.

    ``recomputable``: there is a workload where the backward pass recomputes all of it instead.
    """

    stage: int
    matrices: tuple[str, ...]
    recomputable: bool


@dataclass(frozen=True, slots=True)
class EdgeArray:
    """``columns`` values of ``itemsize`` bytes for every edge, in the order of a direction's edges."""

    columns: int
    itemsize: int

    @property
    def edge_bytes(self) -> int:
        return self.columns * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """One direction of the graph: ``tile_edges[i]`` is the number of edges of tiles 0…i-1 (a coarse indptr).
    ``data``: what is read of that direction's edges besides. ``halo``: where several processes each compute a share of
    the rows, those of others that the edges into this one's lead to, ascending (None: any); ``halo_rows``: how many
    these are of the process that has most, before they are known."""

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
        """All that is read of the edges: None is their indices."""
        indices: dict[EdgeData | None, EdgeArray] = {None: EdgeArray(1, self.index_itemsize)}
        return indices | dict(self.data)

    def edges_of(self, rows: range, tile_rows: int) -> int:
        """The edges of ``rows``, rounded to whole tiles."""
        last = len(self.tile_edges) - 1
        return self.tile_edges[min(last, -(-rows.stop // tile_rows))] - self.tile_edges[rows.start // tile_rows]

    def edge_bytes(self, data: Collection[EdgeData]) -> int:
        """Bytes of an edge with ``data``."""
        return self.index_itemsize + sum(self.data[kind].edge_bytes for kind in data)


@dataclass(frozen=True, slots=True, eq=False)
class Bucketing:
    """How sources can be shuffled to those who gather them (``ooc.plan.layout.shuffle``): by the edges of
    ``direction``, out of every row, and ``gathered`` many at a time, which is counted when it is first asked for.
    ``exact``: no fewer are (of links there may be, as other ones are drawn for every step). ``gathers_own``: those who
    gather are sources, too, and gather their own rows."""

    direction: EdgesKey
    gathered: GatheredRows
    exact: bool = True
    gathers_own: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """What process ``rank`` computes: neighbouring rows of the nodes of each type. ``every``: by type, those of every
    process."""

    rank: int
    every: Mapping[str, Sequence[range]]

    @property
    def count(self) -> int:
        """How many processes there are."""
        return max(map(len, self.every.values()))

    @property
    def rows(self) -> dict[str, range]:
        """This process's, by type."""
        return {space: some[self.rank] for space, some in self.every.items()}

    def own(self, space: str, rows: int) -> range:
        """Which of the first ``rows`` rows of nodes of a type."""
        return self.of(self.rank, space, rows)

    def of(self, rank: int, space: str, rows: int) -> range:
        """The same of any process; their numbers go round."""
        some = self.every[space]
        share = some[rank % len(some)]
        return range(min(rows, share.start), min(rows, share.stop))

    def in_turn(self, space: str, rows: int) -> list[range]:
        """In which order the process pulls the first ``rows`` rows for all: those of the process behind it, of the one
        behind that, …, its own last. So each is sent some by one other at a time."""
        return [self.of(self.rank + by, space, rows) for by in range(1, self.count + 1)]

    def __len__(self) -> int:
        """Rows of all types."""
        return sum(map(len, self.rows.values()))


@dataclass(frozen=True)
class Workload:
    """Everything the planner needs to know of a model on a graph.

    ``programs`` are the stage sequences, in the order they may run: ``prepare`` once, then ``train`` and ``evaluate``
    any number of times. ``fixed_host_bytes`` and ``fixed_device_bytes`` are always there (row offsets and scalings;
    parameters, their gradients and the optimizer's moments). ``threads`` tiles are computed at once, in ``dtype``, and
    ``tasks_ahead`` are under way or wait, or one for each. ``kept`` says what waits for the backward pass, in the order
    of the forward stages; ``recomputed`` matrices do not: it computes them again. Kernels take values of
    ``pulled_itemsize`` bytes; plain sums, with ``sums_as_kept``, and what says so of itself, values as they are kept.
    ``scatter_counts``: by matrix that a pull scatters to, how often something is added to a row of its tiles 0…i-1;
    without that, it can only be in memory whole. ``parts``: how plain sums are made where that takes memory.
    ``bucketing``: by direction, how what opaque layers gather over its edges can be shuffled; without that, it can only
    be in memory whole. ``share``: what this process computes, of each stage as many of its rows as that has (None:
    all). ``state_bytes``: that the optimizer reads from the SSD and writes there to make its step. ``line_bytes``: of
    which rows in memory that plain sums pull are better whole multiples (1: of none).
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
    leanest: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The choices of least memory that were found, which depend on no budget."""

    def own(self, space: str, rows: int) -> range:
        """Which of the first ``rows`` rows of nodes of a type this process computes."""
        return range(rows) if self.share is None else self.share.own(space, rows)

    @property
    def part_edges(self) -> int:
        """A row's edges may be cut at multiples of so many from its own first."""
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
        """What all threads compute tiles of rows in, at least."""
        tiles = (min(one.rows, self.tile_rows, one.rows_at_once) * one.scratch_bytes_per_row for one in self.stages)
        return self.threads * max(tiles, default=0)

    @cached_property
    def shardable(self) -> frozenset[str]:
        """The matrices whose slabs may be sharded among the processes, each of which pulls its own for all rows:
        those that are pulled over edges, by no opaque layer, and that a program writes before it pulls them, as it does
        what rows bring to the pull."""
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
        """Columns of a slab of matrix ``name``, the most first, so that all processes have as many slabs."""
        columns, kind = self.matrices[name].columns, self.groupings.get(name)
        groups, slices = (columns, 1) if kind is None else (kind.groups, kind.slices)
        return tuple(columns // groups * some for some in sharded_widths(groups, processes_of(self.share), slices))

    @cached_property
    def groupings(self) -> dict[str, PerEdge]:
        """By matrix of which some pull is no plain sum: how its columns lie."""
        return {pull.source: pull.per_edge for pull in self.pulls if pull.per_edge}


def results_at_once(threads: int, tasks_ahead: int) -> int:
    """How many tiles' results there are before they are added up, those being computed included."""
    return 1 if threads == 1 else max(threads, tasks_ahead) + 1


def processes_of(share: Share | None) -> int:
    """How many there are."""
    return 1 if share is None else share.count


@lru_cache(maxsize=64)
def sharded_widths(groups: int, count: int, slices: int = 1) -> tuple[int, ...]:
    """Groups of columns of a slab, the most first, so that ``count`` processes have as many slabs each: whole heads, of
    which each is so many ``slices``, or as many of one."""
    fitting = (width for width in range(-(-groups // count), 0, -1) if width % slices == 0 or slices % width == 0)
    narrowest = {-(-groups // width): width for width in fitting}
    return tuple(width for slabs, width in narrowest.items() if slabs % count == 0)
