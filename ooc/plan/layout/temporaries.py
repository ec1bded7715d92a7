# SPDX-License-Identifier: Apache-2.0
"""Upper bounds on the temporaries of passes, which lie beside the arena; they follow from the tile with the most
edges."""

from functools import lru_cache
from heapq import nlargest
from operator import sub

from ooc.plan.layout.passes import ColumnPass, MatrixPlan, Pass, RowPass, edges_in_memory, pulled_columns
from ooc.plan.workload import Direction, EdgeData, PerEdge, Pull, Topology, Workload, results_at_once

PULL_TILE_ROWS = 2048
"""Rows of a slab that one thread pulls at a time. Sums of different rows are independent, so any number would do."""
_BYTES_PER_TILE_EDGE = 32
"""Bytes for each edge of a tile: leaving out neighbours beyond the source's rows (a mask, a running count, the indices
kept), and joining indices that lie in two frames."""
_MARKS_OF_AN_EDGE = 1
"""Bytes for each edge, beside joined indices, if a layer takes its edges in runs: whether a row's indices ascend."""
_MARKS_OF_AN_EDGE_ON_A_DEVICE = 4
"""Bytes for each edge, beside joined indices, if kernels leave out neighbours by themselves: whether a row's indices
ascend."""
_LEAST_ITEMSIZE_READ = 4
"""The narrowest edge features, in bytes, that compiled loops read; narrower ones are converted for the whole tile."""
_BYTES_PER_TILE_ROW_ON_A_DEVICE = 16
"""Bytes for each row of a tile on a device: its first edge as brought from the host, and counted from the tile's
first."""


def scratch_nbytes(item: Pass, matrices: dict[str, MatrixPlan], workload: Workload, frame_bytes: int) -> int:
    """Return a bound on the temporaries of a pass, in bytes, for all threads together. One thread has the tile with the
    most edges; every other one has at most the second most."""
    if isinstance(item, ColumnPass):
        grid, out = matrices[item.pull.source].grid, matrices[item.output].grid
        tile = item.rows_at_once
        width = max(grid.slab_columns, out.slab_columns)
        nbytes = 2 * min(item.rows, tile) * width * workload.pulled_itemsize
        nbytes += frame_bytes  # a block being widened on its way into a slab buffer
    else:
        tile = workload.tile_rows
        at_once = min(item.rows, tile, item.stage.rows_at_once)
        nbytes = at_once * item.stage.scratch_bytes_per_row
        if item.sweeps is not None:  # what is pulled of the last slab, and all pulled columns concatenated
            pull, grid = item.sweeps.pull, matrices[item.sweeps.pull.source].grid
            width = grid.columns + pulled_columns(item, grid)
            nbytes += at_once * pull.output_columns(width, grid.columns) * workload.pulled_itemsize
            nbytes += frame_bytes
        if item.stage.entry_bytes:
            entries = most_edges(workload.topologies[Direction.FEATURES], tile, item.rows, tile)
            nbytes += item.stage.beside_bytes + item.stage.entry_bytes * entries
    if item.pull is None:
        return workload.threads * nbytes
    if workload.parts is not None:
        nbytes += (min(item.rows, tile) + 1) * _BYTES_PER_TILE_ROW_ON_A_DEVICE
    grid = matrices[item.pull.source].grid
    share = min(grid.slab_columns, pulled_columns(item, grid))
    return workload.threads * nbytes + _edges_nbytes(item, item.pull, workload, tile, share, grid.columns)


def opaque_nbytes(workload: Workload) -> int:
    """Return the bytes that opaque layers take for their edges, all threads together, in the pass where that is most.
    No choice makes this less."""
    pulls = ((stage, stage.pull) for stage in workload.stages if stage.pull is not None)
    opaque = ((RowPass(0, stage, (), pull), pull) for stage, pull in pulls if pull.is_opaque)
    return max((_edges_nbytes(*one, workload, workload.tile_rows, 1, 1) for one in opaque), default=0)


def _edges_nbytes(item: Pass, pull: Pull, workload: Workload, tile: int, share: int, columns: int) -> int:
    """Return the bytes that a pass takes for edges, all threads together, if it pulls ``share`` of the source's
    ``columns``."""
    topology, rows = workload.topologies[pull.direction], min(item.rows, tile)
    heaviest = heaviest_tiles(topology, workload.tile_rows, item.rows, tile)
    carried = 2 * workload.part_edges * (isinstance(item, ColumnPass) and item.edges_at_once is not None)
    most, second = (edges_in_memory(item, edges) + carried for edges in heaviest)  # the sum of two parts
    beside = _BYTES_PER_TILE_EDGE
    kind = pull.per_edge
    if kind is not None and not kind.edges_at_once:
        beside = topology.index_itemsize
        features = topology.data.get(EdgeData.FEATURES)
        if features is not None and features.itemsize < _LEAST_ITEMSIZE_READ:
            beside += features.columns * workload.pulled_itemsize
    elif workload.parts is not None or pull.is_opaque:
        marks = _MARKS_OF_AN_EDGE if workload.parts is None else _MARKS_OF_AN_EDGE_ON_A_DEVICE
        beside = marks + topology.index_itemsize
    beside += topology.edge_bytes(pull.edge_data) - topology.index_itemsize  # concatenated from several frames
    beside += 2 * workload.pulled_itemsize * (EdgeData.WEIGHT in pull.edge_data)  # converted, some left out

    def of_edges(edges: int) -> int:
        found = beside * edges
        if kind is not None:
            return found + _kernel_nbytes(kind, edges, rows, share, columns)
        return found if workload.parts is None else found + workload.parts.nbytes(edges=edges, columns=share)

    together = of_edges(most) + (workload.threads - 1) * of_edges(second)
    if kind is not None:
        together += _waiting_nbytes(kind, most, second, rows, workload)
        if kind.waiting_bytes_per_edge and most > kind.waiting_edges and workload.threads > 1:
            together += of_edges(second)  # each thread computes, and the heaviest tile counts once more
    return together


def _waiting_nbytes(kind: PerEdge, most: int, second: int, rows: int, workload: Workload) -> int:
    """Return a bound on the bytes of gradients for other rows that wait to be added, for all tiles under way. One piece
    is counted twice, since it is copied while it is added and other threads compute. If the heaviest tile has more
    edges than may wait, only one piece of it waits."""
    results = results_at_once(workload.threads, workload.tasks_ahead)
    piece = min(most, max(kind.edges_at_once, kind.row_edges))
    heaviest = kind.waiting_nbytes(most if most <= kind.waiting_edges else max(second, piece), rows)
    found = heaviest + (results - 1) * kind.waiting_nbytes(second, rows)
    return found + kind.waiting_nbytes(piece, rows) if workload.threads > 1 else found


def _kernel_nbytes(kind: PerEdge, edges: int, rows: int, share: int, columns: int) -> int:
    """Return a bound on the temporaries of one call of a pull's kernel, for ``share`` of the source's ``columns``."""
    groups = -(-kind.groups * share // columns)
    at_once = min(edges, max(kind.edges_at_once, kind.row_edges)) + rows * (not kind.opaque)
    if not kind.opaque and not kind.row_edges:  # self-loops, one a row, are among the edges of a piece
        at_once = min(at_once, kind.edges_at_once + 1)
    of_edges = at_once * kind.bytes_per_edge * kind.heads(groups)
    of_rows = rows * kind.bytes_per_row * groups
    held = kind.fixed_bytes + kind.held_bytes * (edges > at_once)
    return held - (-of_edges // kind.heads(kind.groups)) - (-of_rows // kind.groups)


def rows_pulled_at_once(pull: Pull, tile_rows: int, summed_rows: int) -> int:
    """Return the rows that one thread pulls at a time in a column pass: whole tiles, and just one if the results depend
    on it.

    A device sums the ``summed_rows`` of a block at once: one launch instead of several.
    """
    if pull.is_opaque:
        return tile_rows
    if summed_rows and pull.per_edge is None:
        return max(tile_rows, summed_rows)
    return max(1, PULL_TILE_ROWS // tile_rows) * tile_rows


def most_edges(topology: Topology, tile_rows: int, rows: int, height: int) -> int:
    """Return the most edges in ``height`` rows, a step or task of whole tiles, among the first ``rows`` rows."""
    return heaviest_tiles(topology, tile_rows, rows, height)[0]


@lru_cache(maxsize=512)
def heaviest_tiles(topology: Topology, tile_rows: int, rows: int, height: int) -> tuple[int, int]:
    """Return the most edges in ``height`` rows, a step or task of whole tiles, and the most in any other one."""
    edges, stride = topology.tile_edges, height // tile_rows
    end = min(-(-rows // height) * stride, len(edges) - 1)
    at = [*edges[:end:stride], edges[end]]
    most, second, *_ = *nlargest(2, map(sub, at[1:], at)), 0, 0
    return most, second
