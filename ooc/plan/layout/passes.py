# SPDX-License-Identifier: Apache-2.0
"""How each matrix of a plan is cut; and the passes of a program: over rows, step by step; over columns, slab by slab.
What each reads and stores, which slabs of it, and what it moves of the matrices that have no blocks, but are shuffled.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, ClassVar, NamedTuple, TypeVar

from ooc.plan.layout.grid import ALIGNMENT_BYTES, Grid, align_up
from ooc.plan.layout.shuffle import Shuffle
from ooc.plan.workload import Direction, EdgeArray, EdgeData, EdgesKey, Matrix, Pull, Share, Stage, Topology, Workload

Found = TypeVar("Found")
STEPS_AT_ONCE = 2
"""Of a pass: while one is computed, the next one's blocks come and its tiles are put out."""
_GENERAL = ", general path"
"""Of a pass that runs an opaque layer: slower than the others."""
_SPILLING = ", sources' gradients spilled"
"""Of one whose sums of gradients are not in memory whole: slower still."""
_SHUFFLED = ", sources shuffled"
"""Of one whose source is not in memory whole, but read as it has been shuffled to its targets."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one matrix is cut, and whether it waits whole in a region, never touching the SSD.

    Regions hold values of ``region_itemsize`` bytes, those that are pulled; blocks may hold narrower ones. ``shuffle``:
    it has no blocks, and goes through a file like that, as partial sums of its rows or as another matrix's rows.
    ``spare_columns``: of no use, behind each row of a region, so that rows are whole cache lines.
    """

    matrix: Matrix
    grid: Grid
    region_itemsize: int
    whole: bool = False
    shuffle: Shuffle | None = None
    spare_columns: int = 0

    @property
    def in_frames(self) -> bool:
        """Whether its blocks lie in frames where they are used."""
        return not self.whole and self.shuffle is None

    @property
    def region_nbytes(self) -> int:
        """Bytes of the matrix whole in a region."""
        return self.matrix.rows * (self.matrix.columns + self.spare_columns) * self.region_itemsize

    def slab_stride(self) -> int:
        """Bytes from one slab buffer to the next."""
        return align_up(self.grid.rows * self.grid.width(0) * self.region_itemsize)


def edges_name(direction: EdgesKey, data: EdgeData | None = None) -> str:
    """What the topology of ``direction`` is called among the matrices, ``in-edges``, ``out-edges``, and what edges
    carry: ``in-weight``, ``in-features``, …"""
    if direction is Direction.FEATURES:
        return "x/indices" if data is None else "x/values"
    return f"{direction.value}-{'edges' if data is None else data.value}"


def edges_swept(item: "Pass", workload: Workload) -> Iterator[tuple[str, Topology, EdgeArray]]:
    """By name: what a pass reads of edges, and of features without their zeros."""
    swept = [] if item.pull is None else [(item.pull.direction, item.pull.edge_data)]
    if isinstance(item, RowPass) and item.stage.entry_bytes:
        swept.append((Direction.FEATURES, (EdgeData.WEIGHT,)))
    for direction, carried in swept:
        topology = workload.topologies[direction]
        for data in (None, *carried):
            yield edges_name(direction, data), topology, topology.arrays[data]


def shuffles_in(names: Iterable[str], matrices: Mapping[str, MatrixPlan]) -> dict[str, Shuffle]:
    """Those of ``names`` that have no blocks."""
    planned = ((name, matrices[name].shuffle) for name in names)
    return {name: shuffle for name, shuffle in planned if shuffle is not None}


@dataclass(frozen=True)
class RowPass:
    """Run ``stage`` step by step. With ``pull``, its source is in memory whole and pulled as the step is computed; or
    its rows come of ``bucketed``; or, with ``sweeps``, its last slab alone is in memory and pulled so.

    ``loads`` are the stage's, and what the pull or the pass before it adds.
    """

    index: int
    stage: Stage
    loads: tuple[str, ...]
    pull: Pull | None
    spills_sums: bool = False
    """Whether what it scatters to is spilled as partial sums."""
    bucketed: str | None = None
    """The matrix that holds the source's rows by the buckets of those who gather them."""
    sweeps: "ColumnPass | None" = None
    """The pass right before it, which pulls all slabs but the last. What is pulled of the last one is put beside these,
    row by row, and never stored but where the stage keeps what it pulls."""
    parts: int = 1
    """In how many steps rows are computed that others would be in one."""
    steps_at_once: int = STEPS_AT_ONCE
    """Whose blocks are in memory, and tiles under way."""

    @property
    def pulled(self) -> str | None:
        """The matrix that the pass before has pulled slabs into for this one, if it has."""
        pull = self.stage.pull
        if pull is None:
            return None
        return next((name for name in (pull.kept, pull.output) if name is not None and name in self.loads), None)

    @property
    def title(self) -> str:
        """What it is called in tables and drawings."""
        if self.pull is None or not self.pull.is_opaque:
            return self.stage.name
        return f"{self.stage.name}{_GENERAL}{_SHUFFLED if self.bucketed else ''}{_SPILLING if self.spills_sums else ''}"

    @property
    def rows(self) -> int:
        """Rows that this pass computes."""
        return self.stage.rows

    @property
    def space(self) -> str:
        """The type of nodes whose rows these are."""
        return self.stage.space

    @property
    def reverse(self) -> bool:
        """Whether it goes over the rows downwards."""
        return self.stage.reverse

    @property
    def replaced(self) -> frozenset[str]:
        """The matrices that it loads and stores: it replaces their rows."""
        return frozenset(self.stage.loads).intersection(self.stage.stores)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return (*self.loads, self.bucketed or self.pull.source) if self.pull else self.loads

    @cached_property
    def stores(self) -> tuple[str, ...]:
        names, pulled = self.stage.stores, self.pulled
        if self.sweeps is None and pulled in names:  # what the pass before has stored, all of it, is not stored again
            names = tuple(name for name in names if name != pulled)
        return names if self.pull is None else (*names, *self.pull.added_to)


@dataclass(frozen=True)
class ShufflePass(RowPass):
    """Shuffle the rows of ``pull.source``, step by step, along the edges out of them; ``pull.output`` is how they lie
    then. Its stage is none of the workload's: it belongs to the pass that pulls the source next."""


@dataclass(frozen=True)
class ColumnPass:
    """Pull the first ``slabs`` slabs of ``pull.source`` into the ``rows`` rows of ``output``, one after the other: all
    of them, or all but the last, which is then left to the row pass behind (``RowPass.sweeps``). ``output`` is that of
    the pull, or the matrix that its stage keeps what is pulled in.

    A thread pulls ``rows_at_once``. ``slab_buffers`` slabs of the source are in memory at a time; if ``direct``, the
    first ones were computed right into them, as far as one pass has written them and nobody else reads them.
    """

    index: int
    rows: int
    pull: Pull
    output: str
    rows_at_once: int
    slabs: int
    slab_buffers: int
    direct: bool = True
    spills_sums: bool = False
    """Whether what it scatters to is spilled as partial sums."""
    space: str = ""
    """The type of nodes whose rows these are."""
    processes: int = 1
    """Among so many the slabs are sharded, so many at a time: each pulls one for the rows of all, and sends them what
    is pulled. Of each of these slabs ``slab_buffers`` have a process's own rows alone, and there is a buffer beside
    them for all rows of the slab that it pulls, and one for what it has pulled until that is sent. With twice as many
    ``slab_buffers``, and two for all rows, the slabs of a turn come while those of the one before it are pulled."""
    steps_at_once: ClassVar[int] = STEPS_AT_ONCE
    edges_at_once: int | None = None
    """That a step has at most: more edges of its rows come in several steps, pieces that begin within rows where these
    have more. None: all of them."""
    reverse: ClassVar[bool] = False
    sweeps: ClassVar[None] = None
    bucketed: ClassVar[None] = None

    @property
    def title(self) -> str:
        """What it is called in tables and drawings."""
        if not self.pull.is_opaque:
            return f"pull {self.pull.source}, {'slab by slab' if self.processes == 1 else 'columns sharded'}"
        return f"pull {self.pull.source}{_GENERAL}{_SPILLING if self.spills_sums else ''}"

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return (self.pull.source, *self.pull.own)

    @cached_property
    def stores(self) -> tuple[str, ...]:
        return (self.output, *self.pull.added_to)

    @property
    def turns_at_once(self) -> int:
        """Where slabs are sharded: of how many turns there are some in memory."""
        return self.slab_buffers // self.processes

    def turn(self, slab: int) -> range:
        """The slabs that are pulled at the same time as ``slab``, by process."""
        first = slab // self.processes * self.processes
        return range(first, first + self.processes)


Pass = RowPass | ColumnPass


class Passes(tuple[Pass, ...]):
    """The passes of a program, in order; what a search asks of them again and again is remembered."""

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """By matrix: the passes that read or write it, by their index."""
        found: dict[str, list[int]] = {}
        for item in self:
            for name in dict.fromkeys((*item.reads, *item.stores)):
                found.setdefault(name, []).append(item.index)
        return found

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    def remembered(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What ``find`` says, which is asked once for each ``key``."""
        if key not in self._known:
            self._known[key] = find()
        found: Found = self._known[key]
        return found


def sweeps_of(item: Pass) -> ColumnPass | None:
    """The column pass one of whose slabs ``item`` pulls: itself, or the one before it that has left the last slab."""
    return item if isinstance(item, ColumnPass) else item.sweeps


def streamed_read_bytes(item: Pass, matrices: Mapping[str, MatrixPlan]) -> int:
    """Bytes that a pass reads from the SSD of what has no blocks."""
    return sum(one.read_nbytes(item.rows) for one in shuffles_in(item.reads, matrices).values())


def streamed_write_bytes(item: Pass, matrices: Mapping[str, MatrixPlan]) -> int:
    """Bytes that it writes there of such."""
    return sum(one.nbytes for one in shuffles_in(item.stores, matrices).values())


def streaming_memory(item: Pass, matrices: Mapping[str, MatrixPlan]) -> dict[str, int]:
    """Bytes of memory that a pass needs for what has no blocks, by matrix."""
    needed: dict[str, int] = {}
    for names, reads in ((item.stores, False), (item.reads, True)):
        for name in names:
            shuffle = matrices[name].shuffle
            if shuffle is not None:
                needed[name] = shuffle.reading_nbytes if reads else shuffle.writing_nbytes
    return needed


def passes_using(passes: Sequence[Pass], name: str) -> list[int]:
    """The passes that read or write matrix ``name``, by their index."""
    if isinstance(passes, Passes):
        return passes.users.get(name, [])
    return [step.index for step in passes if name in step.reads or name in step.stores]


def pulled_by(name: str, passes: Sequence[Pass]) -> list[EdgesKey]:
    """The directions in which ``passes`` pull matrix ``name``."""
    found = (item.pull.direction for item in passes if item.pull is not None and item.pull.source == name)
    return [*dict.fromkeys(found)]


def direct_slabs(passes: Sequence[Pass], column_pass: ColumnPass) -> int:
    """How many slabs the writer of a column pass's source computes right into the slab buffers."""
    if not column_pass.direct:
        return 0
    users = [index for index in passes_using(passes, column_pass.pull.source) if index < column_pass.index]
    written = bool(users) and column_pass.pull.source in passes[users[0]].stores
    return column_pass.slab_buffers if written and len(users) == 1 else 0


def pulled_columns(item: Pass, source: Grid) -> int:
    """Columns of its source, cut like ``source``, that a pass pulls; of slabs that are sharded the first process."""
    first = item.sweeps.slabs if item.sweeps else 0
    stop = item.slabs if isinstance(item, ColumnPass) else source.slabs
    return sum(map(source.width, range(first, stop, item.processes if isinstance(item, ColumnPass) else 1)))


class ShardedPlace(NamedTuple):
    """Where what goes into the pull of slabs that are sharded lies, of one matrix; bytes. From ``begin`` on all rows
    of a slab of each turn at once, ``rows`` each; from ``own_at`` on own rows of so many ``slabs``, ``own`` each."""

    begin: int
    rows: int
    own_at: int
    own: int
    slabs: int


class ShardedMemory(NamedTuple):
    """The region of a column pass whose slabs are sharded, of ``nbytes``: the source and, all columns, what rows
    bring of their own, which may have to be put together for the others; behind these, from ``pulled_at`` on, what is
    pulled for another process."""

    places: dict[str, ShardedPlace]
    pulled_at: int
    nbytes: int


def columns_beside(own: Grid, source: Grid, slab: int) -> range:
    """The columns of ``own`` that go with a slab of ``source``."""
    first = slab * source.slab_columns
    at = (first, first + source.width(slab))
    return range(*(column * own.columns // source.columns for column in at))


def sharded_memory(
    item: ColumnPass, passes: Sequence[Pass], matrices: Mapping[str, MatrixPlan], share: Share
) -> ShardedMemory:
    """That of ``item``; the same for all processes."""
    places, end, source = dict[str, ShardedPlace](), 0, matrices[item.pull.source]
    targets = max(len(share.of(rank, item.space, item.rows)) for rank in range(share.count))
    columns = item.pull.output_columns(source.grid.width(0), source.grid.columns)
    pulled = align_up(targets * columns * source.region_itemsize)
    for name in (item.pull.source, *item.pull.own):
        one, is_source = matrices[name], name == item.pull.source
        most = max(len(sharded_rows(item, passes, one, share, rank)) for rank in range(share.count))
        width = len(columns_beside(one.grid, source.grid, 0))
        rows = align_up((one.grid.rows if is_source else item.rows) * width * one.region_itemsize)
        own = align_up(most * one.grid.width(0) * one.region_itemsize)
        slabs, begin = item.slab_buffers if is_source else one.grid.slabs * (not one.whole), end
        own_at, own = begin + item.turns_at_once * rows, max(own, pulled) if is_source else own
        places[name] = ShardedPlace(begin, rows, own_at, own, slabs)
        end = own_at + slabs * own * (1 if is_source else 2)
    return ShardedMemory(places, end, end + pulled)


def slabs_nbytes(
    item: ColumnPass, passes: Sequence[Pass], matrices: Mapping[str, MatrixPlan], share: Share | None
) -> int:
    """Bytes of the region of a column pass."""
    if item.processes > 1 and share is not None:
        return sharded_memory(item, passes, matrices, share).nbytes
    return item.slab_buffers * matrices[item.pull.source].slab_stride()


def sharded_rows(item: ColumnPass, passes: Sequence[Pass], planned: MatrixPlan, share: Share, rank: int) -> range:
    """The rows of its source, or of what rows bring, that process ``rank`` has in the buffers of slabs that are sharded
    out: its own, and where blocks are read into them all that these blocks have."""
    grid = planned.grid
    own = share.of(rank, planned.matrix.space, grid.rows)
    if planned.whole or (planned.matrix.name == item.pull.source and direct_slabs(passes, item) == item.slabs):
        return own
    blocks = grid.blocks_with(own)
    return range(blocks.start * grid.block_rows, min(grid.rows, blocks.stop * grid.block_rows)) if own else own


def stored_slabs(name: str, index: int, matrices: Mapping[str, MatrixPlan], passes: Sequence[Pass]) -> range:
    """The slabs of matrix ``name`` that row pass ``index`` computes into frames: those only a column pass reads need
    none if they are computed right into its slab buffers, and of what is pulled there is only the last one left."""
    grid, writer = matrices[name].grid, passes[index]
    if isinstance(writer, RowPass) and writer.sweeps is not None and name == writer.pulled:
        return range(writer.sweeps.slabs, grid.slabs)
    users = [passes[p] for p in passes_using(passes, name) if p > index]
    reader = next((item for item in users if isinstance(item, ColumnPass) and item.pull.source == name), None)
    if reader is None:
        return range(grid.slabs)
    others = (item for item in users if item is not reader)
    is_alone = all(isinstance(item, RowPass) and item.sweeps in users and name not in item.loads for item in others)
    return range(direct_slabs(passes, reader) if is_alone else 0, grid.slabs)


def loaded_slabs(name: str, item: RowPass, grid: Grid) -> range:
    """The slabs of matrix ``name``, cut like ``grid``, that a row pass reads: of what is pulled, those that the pass
    before has pulled."""
    return range(item.sweeps.slabs if item.sweeps is not None and name == item.pulled else grid.slabs)


def blocks_of(item: RowPass, matrices: Mapping[str, MatrixPlan], passes: Passes) -> list[tuple[str, range, bool]]:
    """What a row pass uses in frames: matrices, which of their slabs, and whether it stores them."""

    def find() -> list[tuple[str, range, bool]]:
        loads = [name for name in item.loads if matrices[name].in_frames and name not in item.replaced]
        stores = [name for name in item.stores if matrices[name].in_frames]
        return [
            *((name, loaded_slabs(name, item, matrices[name].grid), False) for name in loads),
            *((name, stored_slabs(name, item.index, matrices, passes), True) for name in stores),
        ]

    return passes.remembered(("blocks of", item.index), find)


def slabs_beside(source: Grid, own: Grid, slab: int) -> range:
    """The slabs of ``own`` that hold the groups in slab ``slab`` of ``source``."""
    columns = columns_beside(own, source, slab)
    return range(columns.start // own.slab_columns, -(-columns.stop // own.slab_columns))


def row_step_rows(item: RowPass, step_rows: int) -> int:
    """Rows of a step of a row pass, where most have ``step_rows``."""
    return step_rows // item.parts


def column_step_rows(item: ColumnPass, matrices: Mapping[str, MatrixPlan], step_rows: int) -> int:
    """Rows of a step of a column pass: a block of the output, or of the own rows that go with it, but no fewer than
    the ``step_rows`` of a row pass."""
    heights = [matrices[name].grid.block_rows for name in item.pull.own if not matrices[name].whole]
    return max(step_rows, min([matrices[item.output].grid.block_rows, *heights]))


def edges_together(item: Pass, edges: int) -> int:
    """How many ``edges`` of some rows a pass has at a time."""
    if isinstance(item, ColumnPass) and item.edges_at_once is not None:
        return min(edges, item.edges_at_once)
    return edges


def edge_grid(array: EdgeArray, edges: int, frame_bytes: int) -> Grid:
    """An array of one direction's edges, padding to whole pages included, cut into frames at whole pages."""
    paged_rows = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, array.edge_bytes)
    height = frame_bytes // array.edge_bytes
    height -= height % paged_rows if height > paged_rows else 0
    return Grid(align_up(max(1, edges), paged_rows), array.columns, array.itemsize, height, array.columns)
