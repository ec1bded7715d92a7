# SPDX-License-Identifier: Apache-2.0
"""How long computing and moving take on a machine, and which of two ways takes less: of a step, for the simulator, and
of a whole pass, for forecasts of layouts.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ooc.plan.hardware import Hardware
from ooc.plan.layout.passes import ColumnPass, MatrixPlan, Pass, RowPass, sweeps_of
from ooc.plan.workload import PerEdge, Stage, Workload

MULTIPLIES_PER_PULL = 32
"""Multiply-adds of a dense product that take as long as pulling one value of one neighbour. Measured on two AVX-512
cores: 0.21 ns a pulled value (10M edges, 128 columns), 0.0067 ns a multiply-add (500k × 128 × 128)."""
PRODUCTS_PER_EPOCH = 3
"""Dense products of a linear map: forward, for its input's gradient, and for its weight's."""
PULLS_PER_EPOCH = 2
"""Pulls of an aggregation: forward and backward."""


def pull_seconds(
    hardware: Hardware,
    edges: int,
    columns: int,
    slab_columns: int,
    itemsize: int,
    *,
    rows: int = 0,
    source_rows: int = 0,
) -> float:
    """Seconds to sum ``columns`` columns of ``itemsize`` bytes over ``edges`` edges, ``slab_columns`` at a time.

    ``rows`` are the rows pulled, ``source_rows`` those of the slab (0: it is taken to be far larger than the cache).
    """
    whole, rest = divmod(columns, slab_columns)
    seconds = whole * _edge_seconds(hardware, slab_columns * itemsize, source_rows)
    seconds += _edge_seconds(hardware, rest * itemsize, source_rows) if rest else 0.0
    return edges * seconds + rows * (whole + (rest > 0)) * hardware.processor.pull_seconds_per_row


def _edge_seconds(hardware: Hardware, row_bytes: int, source_rows: int) -> float:
    """Seconds to add one row: so often as the cache holds of the slab it comes from there."""
    processor = hardware.processor
    far = processor.pull_seconds_per_edge.at(row_bytes)
    if processor.cached_pull_seconds_per_edge is None or not source_rows:
        return far
    near = min(far, processor.cached_pull_seconds_per_edge.at(row_bytes))
    hits = min(1.0, processor.cache_bytes / (row_bytes * source_rows))
    return hits * near + (1 - hits) * far


def ssd_seconds(hardware: Hardware, *, read_bytes: int, write_bytes: int, request_bytes: int) -> float:
    """Seconds to move so much in requests of ``request_bytes``, both ways at once."""
    disk = hardware.disk
    one_way = max(
        read_bytes / disk.read_bytes_per_s.at(request_bytes), write_bytes / disk.write_bytes_per_s.at(request_bytes)
    )
    return max(one_way, (read_bytes + write_bytes) / disk.both_ways_bytes_per_s)


def pcie_seconds(hardware: Hardware, *, to_device_bytes: int, to_host_bytes: int) -> float:
    """Seconds between host and device, both ways at once; nothing where the CPU computes."""
    if hardware.wire is None:
        return 0.0
    wire = hardware.wire
    return max(to_device_bytes / wire.to_device_bytes_per_s, to_host_bytes / wire.to_host_bytes_per_s)


def together_seconds(hardware: Hardware, *seconds: float) -> float:
    """Seconds of resources that work at the same time: the busiest, and what of the others it does not hide."""
    longest = max(seconds)
    return longest + (1 - hardware.overlap) * (sum(seconds) - longest)


def aggregating_first_pays(
    *, rows_before: int, rows_after: int, edges_per_row: float, in_columns: int, out_columns: int
) -> bool:
    """Whether A(H) W beats A(H W) for a layer from ``rows_before`` active rows to ``rows_after``.

    Aggregating first pulls the layer's input instead of its output, and multiplies only the rows that the
    aggregation leaves.
    """
    product = PRODUCTS_PER_EPOCH * in_columns * out_columns
    pulled_value = PULLS_PER_EPOCH * MULTIPLIES_PER_PULL * edges_per_row * rows_after
    transform_first = rows_before * product + pulled_value * out_columns
    aggregate_first = rows_after * product + pulled_value * in_columns
    return aggregate_first < transform_first


def transforming_constants_pays(*, edges_per_row: float, in_columns: int, out_columns: int, read_beside: bool) -> bool:
    """Whether A(X W) is to be computed in every epoch although X is constant and A(X) would do once.

    A(X) spares an epoch its pulls, and has to be made, as wide as X, and kept. So the narrow side is pulled where that
    takes a small part of what the product takes anyway; and where rows of X are ``read_beside`` the sum, where it takes
    as long: A(X) would be as much again to hold and to read.
    """
    pulled = PULLS_PER_EPOCH * MULTIPLIES_PER_PULL * edges_per_row
    most = (1 if read_beside else _SMALL) * PRODUCTS_PER_EPOCH * in_columns
    return out_columns <= _NARROW * in_columns and pulled <= most


_NARROW, _SMALL = 1 / 8, 1 / 8
"""How narrow the result is beside X, and how short the pulls beside the products, at most. Chosen to spare memory where
it costs little time: GraphSAGE of 128 columns, 1,024 features and 40 edges a node took 1.08 of the processor's time in
memory, the same at a sixteenth of the data, GCN with 16 edges 1.17 in memory."""
_TIMES_STREAMED = 8
"""How often a stage whose work has not been counted reads or writes a value for each that it loads or stores: what the
counted stages of GCN and GraphSAGE come to."""
_PULL_OPERATORS = 8
"""Of a pull besides the sum itself: offsets cut out, made relative and converted, edges taken from their frames."""
_PROGRAM_OPERATORS = 10
"""On a device besides: two programs of Triton, each taken to be launched in the time of four operators of torch, and
the list of the parts of long rows that comes with the offsets."""
_SLAB_OPERATORS = 18
"""On a device besides where something is made of every edge, slab by slab: some columns of a row's own, and the result
put where it belongs. Over a device that does nothing such a pull of GAT took the host as long as 40 to 58 operators;
with these it is 36, times 1.2 (docs/gpu-executor.md). Pulled whole, it took no longer than a sum."""
_BUSY_BY_TASK = 5 / 3
"""Threads of the CPU that a step's task keeps busy: tasks of two steps are under way at most, and the first has to be
over before the third step's begin. Of GraphSAGE with two threads: these were at work for 78 to 82 % of the time that
the SSD was not waited for with a task a step, for 96 % and more with two."""
_TIMES_PUT = 2
"""How often a value that a column pass has pulled is read or written until it lies in its frame."""


class Computing(NamedTuple):
    """Seconds: ``shared_s`` of what all threads of the CPU, or the cores of a device, do together; ``alone_s`` of what
    one thread after the other does where it does nothing else, which launches. ``tasks`` are those of a step, for the
    CPU's threads."""

    shared_s: float
    alone_s: float
    tasks: float

    def together_s(self, workload: Workload, hardware: Hardware) -> float:
        """A device computes while the host calls the next operators, so that the longer of the two counts. On the CPU
        an operator is computed by the thread that calls it, and threads have the interpreter in turn: while one has it,
        others compute, unless there is hardly anything to compute, or they wait for tasks."""
        if hardware.has_device_memory:
            return max(self.shared_s, self.alone_s)
        threads = workload.threads
        together_s = self.shared_s * max(1.0, hardware.threads / threads) + self.alone_s / threads
        if self.tasks and tasks_are_few(self.tasks, threads):  # none: of a type that another process computes
            together_s *= threads / (_BUSY_BY_TASK * self.tasks)
        return max(self.alone_s, together_s)


def tasks_are_few(tasks: float, threads: int) -> bool:
    """Whether so many a step leave some of the CPU's threads idle."""
    return _BUSY_BY_TASK * tasks < threads


class Portion(NamedTuple):
    """``rows`` rows of a pass, in ``steps`` steps. ``edges``: of these rows; ``columns`` are pulled over them,
    ``slab_columns`` at a time. ``retained``: the part of what could be for it that is."""

    rows: int
    edges: int
    columns: int
    slab_columns: int
    steps: int
    retained: float = 0.0


def stage_seconds(stage: Stage, rows: int, edges: int, workload: Workload, hardware: Hardware) -> float:
    """To compute some rows of a stage with their edges, pulling all columns at once, on one thread of a CPU or a
    device; what steps, tiles and operators cost however few rows they have is left out."""
    seconds = 0.0
    if stage.pull is not None:
        source, kind = workload.matrices[stage.pull.source], stage.pull.per_edge
        seconds += pull_seconds(hardware, edges, source.columns, source.columns, workload.pulled_itemsize, rows=rows)
        if kind is not None:
            portion = Portion(rows, edges, source.columns, source.columns, 1)
            seconds += _edge_work_seconds(kind, portion, source.columns, workload, hardware)
    columns = sum(workload.matrices[name].columns for name in (*stage.loads, *stage.stores))
    return seconds + _rows_seconds(stage, rows, columns, workload, hardware)


def _rows_seconds(stage: Stage, rows: int, columns: int, workload: Workload, hardware: Hardware) -> float:
    """Of dense products and element-wise work on some rows of a stage that loads and stores so many columns."""
    streamed_bytes = stage.streamed_bytes_per_row or _TIMES_STREAMED * columns * workload.pulled_itemsize
    products_s = stage.multiplies_per_row / _multiplies_per_s(workload, hardware)
    return rows * (streamed_bytes / hardware.processor.stream_bytes_per_s + products_s)


def _multiplies_per_s(workload: Workload, hardware: Hardware) -> float:
    rates = hardware.processor.multiplies_per_s
    return rates.get(workload.dtype, rates["float32"])


def computing_of(
    item: Pass, portion: Portion, workload: Workload, matrices: Mapping[str, MatrixPlan], hardware: Hardware
) -> Computing:
    """To compute a portion of a pass, the SSD aside."""
    rows, edges, columns, slab_columns, steps, retained = portion
    at_once = item.rows_at_once if isinstance(item, ColumnPass) else workload.tile_rows
    processor, tiles = hardware.processor, -(-rows // at_once)
    slabs = -(-columns // slab_columns) if item.pull is not None else 1
    shared = alone = 0.0
    if item.pull is not None:
        source = matrices[item.pull.source]
        itemsize, height = source.region_itemsize, source.matrix.rows
        shared += pull_seconds(hardware, edges, columns, slab_columns, itemsize, rows=rows, source_rows=height)
        operators, kind = float(_PULL_OPERATORS), item.pull.per_edge
        if kind is not None:
            shared += _edge_work_seconds(kind, portion, source.matrix.columns, workload, hardware)
            if kind.work is not None:
                calls = max(tiles, edges // kind.edges_at_once) if kind.opaque else tiles
                operators += (kind.work.operators - retained * kind.work.retainable_operators) * calls / tiles
        if hardware.has_device_memory:
            operators += _PROGRAM_OPERATORS
            operators += _SLAB_OPERATORS * (kind is not None and sweeps_of(item) is not None)
        alone += tiles * slabs * operators * processor.seconds_per_operator
    if isinstance(item, RowPass):
        stage = item.stage
        columns_used = sum(matrices[name].matrix.columns for name in (*item.loads, *item.stores))
        shared += _rows_seconds(stage, rows, columns_used, workload, hardware)
        alone += tiles * (processor.seconds_per_tile + stage.operators * processor.seconds_per_operator)
    else:
        shared += _TIMES_PUT * rows * columns * workload.pulled_itemsize / processor.stream_bytes_per_s
        alone += tiles * slabs * processor.seconds_per_tile
    alone += steps * processor.seconds_per_step
    return Computing(shared, alone, tiles * slabs / steps)


def _edge_work_seconds(kind: PerEdge, portion: Portion, of: int, workload: Workload, hardware: Hardware) -> float:
    """Of what is computed for edges in slabs of a matrix ``of`` so many columns, operators aside."""
    rows, edges, columns, slab_columns, _, retained = portion
    groups, slab_groups = (kind.groups * some // of for some in (columns, slab_columns))
    slabs, rest = divmod(groups, slab_groups)
    heads = slabs * kind.heads(slab_groups) + kind.heads(rest)
    work, rate = kind.work, hardware.processor.stream_bytes_per_s
    if not kind.opaque:  # of which operators stream what they make of edges
        rate = hardware.processor.computed_bytes_per_s or rate
    if work is None:
        return edges * kind.bytes_per_edge * heads / kind.heads(kind.groups) / rate
    of_slab = work.bytes_per_edge - retained * work.retainable_bytes_per_edge
    of_edges = (slabs + (rest > 0)) * of_slab + heads * work.bytes_per_edge_and_head
    nbytes = edges * of_edges + rows * work.bytes_per_row * groups / kind.groups
    multiplies = edges * (work.multiplies_per_edge - retained * work.retainable_multiplies_per_edge)
    return nbytes / rate + multiplies / _multiplies_per_s(workload, hardware)
