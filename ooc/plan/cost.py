# SPDX-License-Identifier: Apache-2.0
"""Seconds that computing and moving data take on a machine, for a step (used by the simulator) and for a whole pass
(used by forecasts)."""

from collections.abc import Mapping
from typing import NamedTuple

from ooc.plan.hardware import Hardware
from ooc.plan.layout.passes import ColumnPass, MatrixPlan, Pass, RowPass, sweeps_of
from ooc.plan.workload import PerEdge, Stage, Workload

MULTIPLIES_PER_PULL = 32
"""Multiply-adds of a dense product that take as long as pulling one value of one neighbour. Measured on two AVX-512
cores: 0.21 ns a pulled value (10M edges, 128 columns), 0.0067 ns a multiply-add (500k × 128 × 128)."""
PRODUCTS_PER_EPOCH = 3
"""Dense products of a linear map in an epoch: forward, for its input's gradient, and for its weight's."""
PULLS_PER_EPOCH = 2
"""Pulls of an aggregation in an epoch: forward and backward."""


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
    """Return the seconds to sum ``columns`` columns of ``itemsize`` bytes over ``edges`` edges, ``slab_columns``
    columns at a time.

    ``rows``: the rows that are pulled; ``source_rows``: the rows of the slab (0: far more than fit the cache).
    """
    whole, rest = divmod(columns, slab_columns)
    seconds = whole * _edge_seconds(hardware, slab_columns * itemsize, source_rows)
    seconds += _edge_seconds(hardware, rest * itemsize, source_rows) if rest else 0.0
    return edges * seconds + rows * (whole + (rest > 0)) * hardware.processor.pull_seconds_per_row


def _edge_seconds(hardware: Hardware, row_bytes: int, source_rows: int) -> float:
    """Return the seconds to add one row. The slab's share that fits the cache is read at the cache's rate."""
    processor = hardware.processor
    far = processor.pull_seconds_per_edge.at(row_bytes)
    if processor.cached_pull_seconds_per_edge is None or not source_rows:
        return far
    near = min(far, processor.cached_pull_seconds_per_edge.at(row_bytes))
    hits = min(1.0, processor.cache_bytes / (row_bytes * source_rows))
    return hits * near + (1 - hits) * far


def ssd_seconds(hardware: Hardware, *, read_bytes: int, write_bytes: int, request_bytes: int) -> float:
    """Return the seconds to read and write these bytes at the same time, in requests of ``request_bytes``."""
    disk = hardware.disk
    one_way = max(
        read_bytes / disk.read_bytes_per_s.at(request_bytes), write_bytes / disk.write_bytes_per_s.at(request_bytes)
    )
    return max(one_way, (read_bytes + write_bytes) / disk.both_ways_bytes_per_s)


def pcie_seconds(hardware: Hardware, *, to_device_bytes: int, to_host_bytes: int) -> float:
    """Return the seconds to move these bytes between host and device, both ways at once; 0 if the CPU computes."""
    if hardware.wire is None:
        return 0.0
    wire = hardware.wire
    return max(to_device_bytes / wire.to_device_bytes_per_s, to_host_bytes / wire.to_host_bytes_per_s)


def concurrent_seconds(hardware: Hardware, *seconds: float) -> float:
    """Return the seconds of resources that work at the same time: the busiest one's, and the part of the others' that
    it does not hide."""
    longest = max(seconds)
    return longest + (1 - hardware.overlap) * (sum(seconds) - longest)


def aggregating_first_pays(
    *, rows_before: int, rows_after: int, edges_per_row: float, in_columns: int, out_columns: int
) -> bool:
    """Whether A(H) W is faster than A(H W) for a layer from ``rows_before`` active rows to ``rows_after``.

    Aggregating first pulls the layer's input instead of its output, and multiplies only the rows that are left after
    the aggregation.
    """
    product = PRODUCTS_PER_EPOCH * in_columns * out_columns
    pulled_value = PULLS_PER_EPOCH * MULTIPLIES_PER_PULL * edges_per_row * rows_after
    transform_first = rows_before * product + pulled_value * out_columns
    aggregate_first = rows_after * product + pulled_value * in_columns
    return aggregate_first < transform_first


def transforming_constants_pays(*, edges_per_row: float, in_columns: int, out_columns: int, read_beside: bool) -> bool:
    """Whether A(X W) should be computed in every epoch, although X is constant and A(X) could be computed once.

    A(X) saves the pulls of every epoch, but it is as wide as X and has to be made and kept. So the narrow product is
    pulled if pulling takes a small part of the time of the products. If rows of X are ``read_beside`` the sum, pulling
    may take as long as the products, since A(X) would double what is held and read.
    """
    pulled = PULLS_PER_EPOCH * MULTIPLIES_PER_PULL * edges_per_row
    most = (1 if read_beside else _SHORT_PULLS) * PRODUCTS_PER_EPOCH * in_columns
    return out_columns <= _NARROW_RESULT * in_columns and pulled <= most


_NARROW_RESULT, _SHORT_PULLS = 1 / 8, 1 / 8
"""The largest width of the result as a fraction of X's, and the longest time of pulls as a fraction of the products'.
Chosen to save memory at little cost in time: GraphSAGE with 128 columns, 1,024 features and 40 edges a node took 1.08
times as long in memory and as long at a sixteenth of the data; GCN with 16 edges took 1.17 times as long in memory."""
_TIMES_STREAMED = 8
"""How often a stage reads or writes a value for each value it loads or stores, if its work has not been counted; the
average of the counted stages of GCN and GraphSAGE."""
_PULL_OPERATORS = 8
"""Operators of a pull beside the sum: cutting out offsets, making them relative and converting them, taking edges from
their frames."""
_PROGRAM_OPERATORS = 10
"""Further operators of a pull on a device: two Triton programs, each of which takes as long to launch as four operators
of torch, and the list of the parts of long rows."""
_SLAB_OPERATORS = 18
"""Further operators on a device for a pull that computes something for every edge in slabs: cutting out columns of own
rows, and putting the result into place. With a stand-in device that computes nothing, such a pull of GAT took the host
as long as 40 to 58 operators; this model counts 36, times 1.2 (docs/gpu-executor.md). A matrix pulled whole took no
longer than a sum."""
_BUSY_BY_TASK = 5 / 3
"""How many threads of the CPU one task a step keeps busy: at most two steps have tasks under way, and the first step
must end before the third one's tasks begin. With two threads on GraphSAGE, these were busy 78 to 82 % of the time not
spent waiting for the SSD with one task a step, and 96 % or more with two."""
_TIMES_STORED = 2
"""How often a value that a column pass has pulled is read or written until it lies in its frame."""


class Computing(NamedTuple):
    """Seconds of computing. ``shared_s``: work that all threads of the CPU, or all cores of a device, do together.
    ``alone_s``: work that one thread does at a time, such as launching operators. ``tasks``: tasks of a step, for the
    CPU's threads."""

    shared_s: float
    alone_s: float
    tasks: float

    def together_s(self, workload: Workload, hardware: Hardware) -> float:
        """Return the seconds of both together. A device computes while the host launches the next operators, so the
        longer of the two counts. On the CPU the thread that calls an operator also computes it, and threads take turns
        in the interpreter: while one interprets, others compute, unless there is hardly anything to compute or they
        wait for tasks."""
        if hardware.has_device_memory:
            return max(self.shared_s, self.alone_s)
        threads = workload.threads
        together_s = self.shared_s * max(1.0, hardware.threads / threads) + self.alone_s / threads
        if self.tasks and tasks_are_few(self.tasks, threads):  # none: another process computes this type
            together_s *= threads / (_BUSY_BY_TASK * self.tasks)
        return max(self.alone_s, together_s)


def tasks_are_few(tasks: float, threads: int) -> bool:
    """Whether this many tasks a step leave some of the CPU's threads idle."""
    return _BUSY_BY_TASK * tasks < threads


class Portion(NamedTuple):
    """A part of a pass: ``rows`` rows in ``steps`` steps, with ``edges`` edges, over which ``columns`` columns are
    pulled, ``slab_columns`` at a time. ``retained``: the fraction of the retainable work that is retained."""

    rows: int
    edges: int
    columns: int
    slab_columns: int
    steps: int
    retained: float = 0.0


def stage_seconds(stage: Stage, rows: int, edges: int, workload: Workload, hardware: Hardware) -> float:
    """Return the seconds to compute some rows of a stage with their edges, pulling all columns at once, on one CPU
    thread or a device. The fixed costs of steps, tiles and operators are left out."""
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
    """Return the seconds of dense products and element-wise work for some rows of a stage that loads and stores
    ``columns`` columns."""
    streamed_bytes = stage.streamed_bytes_per_row or _TIMES_STREAMED * columns * workload.pulled_itemsize
    products_s = stage.multiplies_per_row / _multiplies_per_s(workload, hardware)
    return rows * (streamed_bytes / hardware.processor.stream_bytes_per_s + products_s)


def _multiplies_per_s(workload: Workload, hardware: Hardware) -> float:
    rates = hardware.processor.multiplies_per_s
    return rates.get(workload.dtype, rates["float32"])


def computing_of(
    item: Pass, portion: Portion, workload: Workload, matrices: Mapping[str, MatrixPlan], hardware: Hardware
) -> Computing:
    """Return the computing time of a portion of a pass, without the SSD."""
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
        shared += _TIMES_STORED * rows * columns * workload.pulled_itemsize / processor.stream_bytes_per_s
        alone += tiles * slabs * processor.seconds_per_tile
    alone += steps * processor.seconds_per_step
    return Computing(shared, alone, tiles * slabs / steps)


def _edge_work_seconds(kind: PerEdge, portion: Portion, of: int, workload: Workload, hardware: Hardware) -> float:
    """Return the seconds of what is computed for edges, without operator launches, for slabs of a matrix with ``of``
    columns."""
    rows, edges, columns, slab_columns, _, retained = portion
    groups, slab_groups = (kind.groups * some // of for some in (columns, slab_columns))
    slabs, rest = divmod(groups, slab_groups)
    heads = slabs * kind.heads(slab_groups) + kind.heads(rest)
    work, rate = kind.work, hardware.processor.stream_bytes_per_s
    if not kind.opaque:  # their operators stream per-edge results
        rate = hardware.processor.computed_bytes_per_s or rate
    if work is None:
        return edges * kind.bytes_per_edge * heads / kind.heads(kind.groups) / rate
    of_slab = work.bytes_per_edge - retained * work.retainable_bytes_per_edge
    of_edges = (slabs + (rest > 0)) * of_slab + heads * work.bytes_per_edge_and_head
    nbytes = edges * of_edges + rows * work.bytes_per_row * groups / kind.groups
    multiplies = edges * (work.multiplies_per_edge - retained * work.retainable_multiplies_per_edge)
    return nbytes / rate + multiplies / _multiplies_per_s(workload, hardware)
