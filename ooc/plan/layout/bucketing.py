# SPDX-License-Identifier: Apache-2.0
"""The passes that shuffle a source's rows (``ooc.plan.layout.shuffle``) for a stage that gathers from a matrix not in
memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from ooc.plan.layout.grid import Grid
from ooc.plan.layout.passes import MatrixPlan, Pass, ShufflePass
from ooc.plan.layout.shuffle import BucketedRows, plan_bucketed_rows
from ooc.plan.workload import Kind, PerEdge, Pull, Stage, Workload

_BYTES_PER_EDGE = 160
"""Bytes for each edge while a tile's rows are shuffled: its row and bucket, and their sort order, as int64."""
_ROWS_WAITING = 8
"""Tiles of rows for each thread that are being shuffled, wait for it, or are being cut for a bucket."""
_NO_LIMIT = 1 << 62


def bucketable(workload: Workload) -> frozenset[str]:
    """Return the sources that can be shuffled: every pull of them runs over edges that are known in both directions,
    and row numbers fit the integers of an entry."""
    ways = workload.bucketing
    others = {pull.source for pull in workload.pulls if not pull.is_opaque or pull.direction not in ways}
    return frozenset(
        pull.source
        for pull in workload.pulls
        if pull.source not in others
        and workload.matrices[pull.source].kind is Kind.SCRATCH
        and workload.rows < 1 << (8 * workload.pulled_itemsize - 1)
    )


def leaner_bucketed(passes: Iterable[Pass], matrices: Mapping[str, MatrixPlan]) -> frozenset[str]:
    """Return the sources that take less memory when ``passes`` shuffle them than when they are whole in memory."""
    lean: dict[str, bool] = {}
    for item in passes:
        if isinstance(item, ShufflePass) and item.pull is not None:
            source, shuffle = item.pull.source, matrices[item.pull.output].shuffle
            smaller = shuffle is not None and shuffle.memory_nbytes < matrices[source].region_nbytes
            lean[source] = smaller and lean.get(source, True)
    return frozenset(name for name, smaller in lean.items() if smaller)


def shuffle_passes(
    stage: Stage,
    before: Sequence[Pass],
    matrices: dict[str, MatrixPlan],
    workload: Workload,
    step_rows: int,
    *,
    memory_bytes: int,
) -> tuple[list[Pass], str]:
    """Return the passes that must come between those in ``before`` and the stage, and the matrix the stage then gathers
    from. This is one shuffling pass, or none if the source already lies in buckets. The matrix is added to
    ``matrices``."""
    assert stage.pull is not None
    source, way = stage.pull.source, workload.bucketing[stage.pull.direction]
    writers = [item for item in before if source in item.stores]
    for item in before[writers[-1].index + 1 :]:
        if isinstance(item, ShufflePass) and item.pull is not None and item.pull.source == source:
            planned = matrices[item.pull.output].shuffle
            assert item.pull.direction == way.direction, "a program gathers a source over one kind of edges"
            if isinstance(planned, BucketedRows) and planned.targets >= stage.rows:
                return [], item.pull.output
    of = matrices[source]
    shuffle = plan_bucketed_rows(
        rows=max(item.rows for item in writers),
        targets=stage.rows,
        columns=of.matrix.columns,
        itemsize=of.region_itemsize,
        step_rows=step_rows,
        tile_rows=workload.tile_rows,
        memory_bytes=memory_bytes,
        gathered=way.gathered,
        exact=way.exact,
        gathers_own=way.gathers_own,
    )
    name = _name(source, shuffle, matrices)
    matrix = replace(of.matrix, name=name, rows=max(1, sum(shuffle.entries)), itemsize=of.region_itemsize)
    grid = Grid(matrix.rows, matrix.columns, matrix.itemsize, of.grid.block_rows, matrix.columns)
    matrices[name] = MatrixPlan(matrix, grid, matrix.itemsize, shuffle=shuffle)
    per_edge, per_row = shuffle_scratch(shuffle)
    pull = Pull(source, name, way.direction, PerEdge(1, shuffle.columns, None, _NO_LIMIT, per_edge, 0))
    shuffling = Stage(f"shuffle {source}", shuffle.rows, (source,), pull, (name,), per_row, space=of.matrix.space)
    return [ShufflePass(len(before), shuffling, (source,), pull)], name


def shuffle_scratch(shuffle: BucketedRows) -> tuple[int, int]:
    """Return bounds on the bytes a thread allocates to shuffle a tile: for each edge, and for each row."""
    return _BYTES_PER_EDGE, _ROWS_WAITING * shuffle.entry_bytes


def _name(source: str, shuffle: BucketedRows, matrices: dict[str, MatrixPlan]) -> str:
    """Return the name of a shuffled source. Programs that shuffle it in the same way share one matrix."""
    names = (f"{source} shuffled{f' {number}' if number > 1 else ''}" for number in count(1))
    return next(name for name in names if name not in matrices or matrices[name].shuffle == shuffle)
