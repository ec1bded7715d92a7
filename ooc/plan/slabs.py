# SPDX-License-Identifier: Apache-2.0
"""Which slabs of a matrix a pass computes or reads, and which of them lie in buffers right away."""

from collections.abc import Mapping, Sequence

from ooc.plan.grid import Grid
from ooc.plan.matrices import MatrixPlan
from ooc.plan.passes import ColumnPass, Pass, RowPass, passes_using


def direct_slabs(passes: Sequence[Pass], column_pass: ColumnPass) -> int:
    """How many slabs the writer of a column pass's source computes right into the slab buffers."""
    if not column_pass.direct:
        return 0
    users = [index for index in passes_using(passes, column_pass.pull.source) if index < column_pass.index]
    written = bool(users) and column_pass.pull.source in passes[users[0]].stores
    return column_pass.slab_buffers if written and len(users) == 1 else 0


def pulled_slabs(item: Pass, source: Grid) -> range:
    """The slabs of its source, cut like ``source``, that a pass pulls."""
    if isinstance(item, ColumnPass):
        return range(item.slabs)
    return range(item.rest.slabs if item.rest else 0, source.slabs)


def pulled_columns(item: Pass, source: Grid) -> int:
    """Columns of its source that a pass pulls."""
    return sum(map(source.width, pulled_slabs(item, source)))


def stored_slabs(name: str, index: int, matrices: Mapping[str, MatrixPlan], passes: Sequence[Pass]) -> range:
    """The slabs of matrix ``name`` that row pass ``index`` computes into frames: those only a column pass reads need
    none if they are computed right into its slab buffers, and of what is pulled there is only the last one left."""
    grid, writer = matrices[name].grid, passes[index]
    if isinstance(writer, RowPass) and writer.rest is not None and name == writer.pulled:
        return range(writer.rest.slabs, grid.slabs)
    users = [passes[p] for p in passes_using(passes, name) if p > index]
    readers = [item for item in users if isinstance(item, ColumnPass) or item.rest not in users or name in item.loads]
    if len(readers) == 1 and isinstance(readers[0], ColumnPass) and readers[0].pull.source == name:
        return range(direct_slabs(passes, readers[0]), grid.slabs)
    return range(grid.slabs)


def loaded_slabs(name: str, item: RowPass, grid: Grid) -> range:
    """The slabs of matrix ``name``, cut like ``grid``, that a row pass reads: of what is pulled, those that the pass
    before has pulled."""
    return range(item.rest.slabs if item.rest is not None and name == item.pulled else grid.slabs)


def slabs_beside(source: Grid, own: Grid, slab: int) -> range:
    """The slabs of ``own`` that hold the groups in slab ``slab`` of ``source``."""
    first = slab * source.slab_columns
    last = first + source.width(slab)
    return range(
        first * own.columns // source.columns // own.slab_columns,
        -(-(last * own.columns // source.columns) // own.slab_columns),
    )


def column_step_rows(item: ColumnPass, matrices: Mapping[str, MatrixPlan]) -> int:
    """Rows of a step of a column pass: a block of the output, or of the own rows that go with it."""
    heights = [matrices[name].grid.block_rows for name in item.pull.own if not matrices[name].whole]
    return min([matrices[item.output].grid.block_rows, *heights])
