# SPDX-License-Identifier: Apache-2.0
"""The passes of a program: over rows, step by step, and over columns, slab by slab; and how each matrix is cut for
them.

For each pass this module tells which matrices it reads and stores, which slabs of them, and how many bytes it moves of
matrices that have no blocks but are shuffled through a file.
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
"""Steps of a pass that are in memory at once: while one is computed, the next one's blocks arrive and its tiles are
queued."""
_GENERAL = ", general path"
"""Added to the title of a pass that runs an opaque layer, which is slower than others."""
_SPILLING = ", sources' gradients spilled"
"""Added to the title of a pass whose sums of gradients are not whole in memory, which is slower still."""
_SHUFFLED = ", sources shuffled"
"""Added to the title of a pass whose source is read as it has been shuffled to its targets, since it is not in
memory."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one matrix is cut, and whether it stays whole in a memory region and never touches the SSD.

    Regions hold values of ``region_itemsize`` bytes, as pulls read them; blocks may hold narrower ones. ``shuffle``:
    the matrix has no blocks but goes through a file, as partial sums of its rows or as rows of another matrix.
    ``spare_columns``: unused columns after each row of a region, so that rows are whole cache lines.
    """

    matrix: Matrix
    grid: Grid
    region_itemsize: int
    whole: bool = False
    shuffle: Shuffle | None = None
    spare_columns: int = 0

    @property
    def in_frames(self) -> bool:
        """Whether its blocks lie in frames while they are used."""
        return not self.whole and self.shuffle is None

    @property
    def region_nbytes(self) -> int:
        """Bytes of the whole matrix in a region."""
        return self.matrix.rows * (self.matrix.columns + self.spare_columns) * self.region_itemsize

    def slab_stride(self) -> int:
        """Return the bytes from one slab buffer to the next."""
        return align_up(self.grid.rows * self.grid.width(0) * self.region_itemsize)


def edges_name(direction: EdgesKey, data: EdgeData | None = None) -> str:
    """Return the name of a topology among the matrices (``in-edges``, ``out-edges``), or of the data its edges carry
    (``in-weight``, ``in-features``, …)."""
    if direction is Direction.FEATURES:
        return "x/indices" if data is None else "x/values"
    return f"{direction.value}-{'edges' if data is None else data.value}"


def edges_swept(item: "Pass", workload: Workload) -> Iterator[tuple[str, Topology, EdgeArray]]:
    """Yield the arrays that a pass reads of edges and of sparse features: name, topology and array."""
    swept = [] if item.pull is None else [(item.pull.direction, item.pull.edge_data)]
    if isinstance(item, RowPass) and item.stage.entry_bytes:
        swept.append((Direction.FEATURES, (EdgeData.WEIGHT,)))
    for direction, carried in swept:
        topology = workload.topologies[direction]
        for data in (None, *carried):
            yield edges_name(direction, data), topology, topology.arrays[data]


def shuffles_in(names: Iterable[str], matrices: Mapping[str, MatrixPlan]) -> dict[str, Shuffle]:
    """Return those of the matrices ``names`` that are shuffled and have no blocks."""
    planned = ((name, matrices[name].shuffle) for name in names)
    return {name: shuffle for name, shuffle in planned if shuffle is not None}


@dataclass(frozen=True)
class RowPass:
    """A pass that runs ``stage`` step by step. With ``pull``, the step also pulls: from a source that is whole in
    memory, from rows that were shuffled into ``bucketed``, or, with ``sweeps``, from the last slab alone.

    ``loads``: the matrices that the stage loads, and those that the pull or the pass before adds.
    """

    index: int
    stage: Stage
    loads: tuple[str, ...]
    pull: Pull | None
    spills_sums: bool = False
    """Whether the matrix it scatters to is spilled as partial sums."""
    bucketed: str | None = None
    """The matrix that holds the source's rows in buckets of the rows that gather them."""
    sweeps: "ColumnPass | None" = None
    """The column pass right before it, which pulls all slabs but the last. The pulled columns of the last slab are put
    beside the others row by row; they are stored only if the stage keeps what it pulls."""
    parts: int = 1
    """Into how many steps the rows of an ordinary step are divided."""
    steps_at_once: int = STEPS_AT_ONCE
    """How many steps have their blocks in memory and their tiles under way at once."""

    @property
    def pulled(self) -> str | None:
        """The matrix into which the pass before has pulled slabs for this one, if any."""
        pull = self.stage.pull
        if pull is None:
            return None
        return next((name for name in (pull.kept, pull.output) if name is not None and name in self.loads), None)

    @property
    def title(self) -> str:
        """The name of the pass in tables and drawings."""
        if self.pull is None or not self.pull.is_opaque:
            return self.stage.name
        return f"{self.stage.name}{_GENERAL}{_SHUFFLED if self.bucketed else ''}{_SPILLING if self.spills_sums else ''}"

    @property
    def rows(self) -> int:
        """The number of rows that the pass computes."""
        return self.stage.rows

    @property
    def space(self) -> str:
        """The type of nodes of these rows."""
        return self.stage.space

    @property
    def reverse(self) -> bool:
        """Whether it goes over the rows in descending order."""
        return self.stage.reverse

    @property
    def replaced(self) -> frozenset[str]:
        """The matrices that it both loads and stores, replacing their rows."""
        return frozenset(self.stage.loads).intersection(self.stage.stores)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return (*self.loads, self.bucketed or self.pull.source) if self.pull else self.loads

    @cached_property
    def stores(self) -> tuple[str, ...]:
        names, pulled = self.stage.stores, self.pulled
        # Results that the pass before stored completely are not stored again.
        if self.sweeps is None and pulled in names:
            names = tuple(name for name in names if name != pulled)
        return names if self.pull is None else (*names, *self.pull.added_to)


@dataclass(frozen=True)
class ShufflePass(RowPass):
    """A row pass that shuffles the rows of ``pull.source``, step by step, along their out-edges into ``pull.output``.
    Its stage is not one of the workload's: it belongs to the pass that pulls the source next."""


@dataclass(frozen=True)
class ColumnPass:
    """A pass that pulls the first ``slabs`` slabs of ``pull.source``, one after the other, into the ``rows`` rows of
    ``output``. These are all slabs, or all but the last, which the next row pass then pulls (``RowPass.sweeps``).
    ``output`` is the pull's own output, or the matrix in which the stage keeps the pulled rows.

    A thread pulls ``rows_at_once`` rows at a time. ``slab_buffers`` slabs of the source are in memory at a time. If
    ``direct``, the first ones were computed right into them, provided that only one pass has written them and no other
    reads them.
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
    """Whether the matrix it scatters to is spilled as partial sums."""
    space: str = ""
    """The type of nodes of the pulled rows."""
    processes: int = 1
    """The number of processes among which the slabs are sharded. Each process pulls one slab a turn for everyone's
    rows, and sends the pulled rows to the others. ``slab_buffers`` buffers hold the process's own rows of slabs; one
    more holds all rows of the slab it pulls, and one the pulled rows until they are sent. With twice as many
    ``slab_buffers``, and two buffers for all rows, the slabs of the next turn arrive while those of this turn are
    pulled."""
    steps_at_once: ClassVar[int] = STEPS_AT_ONCE
    edges_at_once: int | None = None
    """The most edges of a step (None: any). More edges come in several steps, which may begin within a row."""
    reverse: ClassVar[bool] = False
    sweeps: ClassVar[None] = None
    bucketed: ClassVar[None] = None

    @property
    def title(self) -> str:
        """The name of the pass in tables and drawings."""
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
        """How many turns have slabs in memory at once, if slabs are sharded."""
        return self.slab_buffers // self.processes

    def turn(self, slab: int) -> range:
        """Return the slabs that are pulled in the same turn as ``slab``, by process."""
        first = slab // self.processes * self.processes
        return range(first, first + self.processes)


Pass = RowPass | ColumnPass


class Passes(tuple[Pass, ...]):
    """The passes of a program, in order. Results that a search asks for repeatedly are remembered."""

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """The passes that read or write each matrix, by name, as indices."""
        found: dict[str, list[int]] = {}
        for item in self:
            for name in dict.fromkeys((*item.reads, *item.stores)):
                found.setdefault(name, []).append(item.index)
        return found

    @cached_property
    def _remembered(self) -> dict[Hashable, Any]:
        return {}

    def remembered(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """Return ``find()``, which is called once for each ``key``."""
        if key not in self._remembered:
            self._remembered[key] = find()
        found: Found = self._remembered[key]
        return found


def sweeps_of(item: Pass) -> ColumnPass | None:
    """Return the column pass of which ``item`` pulls a slab: itself, or the one before it that has left the last
    slab."""
    return item if isinstance(item, ColumnPass) else item.sweeps


def streamed_read_bytes(item: Pass, matrices: Mapping[str, MatrixPlan]) -> int:
    """Return the bytes that a pass reads from the SSD of matrices without blocks."""
    return sum(one.read_nbytes(item.rows) for one in shuffles_in(item.reads, matrices).values())


def streamed_write_bytes(item: Pass, matrices: Mapping[str, MatrixPlan]) -> int:
    """Return the bytes that a pass writes to the SSD of matrices without blocks."""
    return sum(one.nbytes for one in shuffles_in(item.stores, matrices).values())


def streaming_memory(item: Pass, matrices: Mapping[str, MatrixPlan]) -> dict[str, int]:
    """Return the bytes of memory that a pass needs for matrices without blocks, by name."""
    needed: dict[str, int] = {}
    for names, reads in ((item.stores, False), (item.reads, True)):
        for name in names:
            shuffle = matrices[name].shuffle
            if shuffle is not None:
                needed[name] = shuffle.reading_nbytes if reads else shuffle.writing_nbytes
    return needed


def passes_using(passes: Passes, name: str) -> list[int]:
    """Return the indices of the passes that read or write matrix ``name``."""
    return passes.users.get(name, [])


def pulled_by(name: str, passes: Sequence[Pass]) -> list[EdgesKey]:
    """Return the directions in which ``passes`` pull matrix ``name``."""
    found = (item.pull.direction for item in passes if item.pull is not None and item.pull.source == name)
    return [*dict.fromkeys(found)]


def direct_slabs(passes: Passes, column_pass: ColumnPass) -> int:
    """Return how many slabs are computed right into the slab buffers by the pass that writes the column pass's
    source."""
    if not column_pass.direct:
        return 0
    users = [index for index in passes_using(passes, column_pass.pull.source) if index < column_pass.index]
    written = bool(users) and column_pass.pull.source in passes[users[0]].stores
    return column_pass.slab_buffers if written and len(users) == 1 else 0


def pulled_columns(item: Pass, source: Grid) -> int:
    """Return how many columns a pass pulls of a source that is cut like ``source``; with sharded slabs, how many the
    first process pulls."""
    first = item.sweeps.slabs if item.sweeps else 0
    stop = item.slabs if isinstance(item, ColumnPass) else source.slabs
    return sum(map(source.width, range(first, stop, item.processes if isinstance(item, ColumnPass) else 1)))


class ShardedPlace(NamedTuple):
    """Where the inputs of a pull with sharded slabs lie in memory, for one matrix, in bytes. From ``begin`` on lie
    slabs with all rows, one for each turn in memory, of ``rows`` bytes each; from ``own_at`` on lie ``slabs`` slabs
    with the process's own rows, of ``own`` bytes each."""

    begin: int
    rows: int
    own_at: int
    own: int
    slabs: int


class ShardedMemory(NamedTuple):
    """The memory region of a column pass with sharded slabs, ``nbytes`` bytes. It holds the source and the own rows of
    the pull, in all columns, as they may have to be assembled for other processes; from ``pulled_at`` on, the rows that
    are pulled for another process."""

    places: dict[str, ShardedPlace]
    pulled_at: int
    nbytes: int


def matching_columns(own: Grid, source: Grid, slab: int) -> range:
    """Return the columns of ``own`` that belong to a slab of ``source``."""
    first = slab * source.slab_columns
    at = (first, first + source.width(slab))
    return range(*(column * own.columns // source.columns for column in at))


def sharded_memory(item: ColumnPass, passes: Passes, matrices: Mapping[str, MatrixPlan], share: Share) -> ShardedMemory:
    """Return the memory region of ``item``, which is the same in all processes."""
    places, end, source = dict[str, ShardedPlace](), 0, matrices[item.pull.source]
    targets = max(len(share.of(rank, item.space, item.rows)) for rank in range(share.count))
    columns = item.pull.output_columns(source.grid.width(0), source.grid.columns)
    pulled = align_up(targets * columns * source.region_itemsize)
    for name in (item.pull.source, *item.pull.own):
        one, is_source = matrices[name], name == item.pull.source
        most = max(len(sharded_rows(item, passes, one, share, rank)) for rank in range(share.count))
        width = len(matching_columns(one.grid, source.grid, 0))
        rows = align_up((one.grid.rows if is_source else item.rows) * width * one.region_itemsize)
        own = align_up(most * one.grid.width(0) * one.region_itemsize)
        slabs, begin = item.slab_buffers if is_source else one.grid.slabs * (not one.whole), end
        own_at, own = begin + item.turns_at_once * rows, max(own, pulled) if is_source else own
        places[name] = ShardedPlace(begin, rows, own_at, own, slabs)
        end = own_at + slabs * own * (1 if is_source else 2)
    return ShardedMemory(places, end, end + pulled)


def slabs_nbytes(item: ColumnPass, passes: Passes, matrices: Mapping[str, MatrixPlan], share: Share | None) -> int:
    """Return the bytes of the memory region of a column pass."""
    if item.processes > 1 and share is not None:
        return sharded_memory(item, passes, matrices, share).nbytes
    return item.slab_buffers * matrices[item.pull.source].slab_stride()


def sharded_rows(item: ColumnPass, passes: Passes, planned: MatrixPlan, share: Share, rank: int) -> range:
    """Return the rows of the source, or of own rows, that process ``rank`` has in the buffers of sharded slabs: its own
    rows, and if blocks are read into the buffers, all rows of these blocks."""
    grid = planned.grid
    own = share.of(rank, planned.matrix.space, grid.rows)
    if planned.whole or (planned.matrix.name == item.pull.source and direct_slabs(passes, item) == item.slabs):
        return own
    blocks = grid.blocks_with(own)
    return range(blocks.start * grid.block_rows, min(grid.rows, blocks.stop * grid.block_rows)) if own else own


def stored_slabs(name: str, index: int, matrices: Mapping[str, MatrixPlan], passes: Passes) -> range:
    """Return the slabs of matrix ``name`` that row pass ``index`` computes into frames. Slabs that only a column pass
    reads need none if they are computed right into its slab buffers. Of pulled rows, only the last slab is left."""
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
    """Return the slabs of matrix ``name``, cut like ``grid``, that a row pass reads; of pulled rows, those that the
    pass before has pulled."""
    return range(item.sweeps.slabs if item.sweeps is not None and name == item.pulled else grid.slabs)


def blocks_of(item: RowPass, matrices: Mapping[str, MatrixPlan], passes: Passes) -> list[tuple[str, range, bool]]:
    """Return what a row pass uses in frames: each matrix with its slabs, and whether they are stored."""

    def find() -> list[tuple[str, range, bool]]:
        loads = [name for name in item.loads if matrices[name].in_frames and name not in item.replaced]
        stores = [name for name in item.stores if matrices[name].in_frames]
        return [
            *((name, loaded_slabs(name, item, matrices[name].grid), False) for name in loads),
            *((name, stored_slabs(name, item.index, matrices, passes), True) for name in stores),
        ]

    return passes.remembered(("blocks of", item.index), find)


def matching_slabs(source: Grid, own: Grid, slab: int) -> range:
    """Return the slabs of ``own`` that hold the groups of slab ``slab`` of ``source``."""
    columns = matching_columns(own, source, slab)
    return range(columns.start // own.slab_columns, -(-columns.stop // own.slab_columns))


def row_step_rows(item: RowPass, step_rows: int) -> int:
    """Return the rows of a step of a row pass, where ordinary steps have ``step_rows``."""
    return step_rows // item.parts


def column_step_rows(item: ColumnPass, matrices: Mapping[str, MatrixPlan], step_rows: int) -> int:
    """Return the rows of a step of a column pass: a block of the output, or of the own rows it needs, but at least
    ``step_rows``."""
    heights = [matrices[name].grid.block_rows for name in item.pull.own if not matrices[name].whole]
    return max(step_rows, min([matrices[item.output].grid.block_rows, *heights]))


def edges_in_memory(item: Pass, edges: int) -> int:
    """Return how many of the ``edges`` of some rows a pass has in memory at a time."""
    if isinstance(item, ColumnPass) and item.edges_at_once is not None:
        return min(edges, item.edges_at_once)
    return edges


def edge_grid(array: EdgeArray, edges: int, frame_bytes: int) -> Grid:
    """Return the grid of an array of one direction's edges, padded to whole pages and cut into frames at page
    boundaries."""
    paged_rows = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, array.edge_bytes)
    height = frame_bytes // array.edge_bytes
    height -= height % paged_rows if height > paged_rows else 0
    return Grid(align_up(max(1, edges), paged_rows), array.columns, array.itemsize, height, array.columns)
