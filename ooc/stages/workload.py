# SPDX-License-Identifier: Apache-2.0
"""The memory that a network on a graph needs, as plain data for the planner."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from ooc.kernels import memory
from ooc.kernels.aggregate import sums_rows_of
from ooc.kernels.pulls import are_compiled
from ooc.model.graph import are_between_types, ends_of, reverse_of
from ooc.model.lowering.network import Network
from ooc.plan.layout.temporaries import most_edges
from ooc.plan.moves import LINE_BYTES
from ooc.plan.workload import (
    Bucketing,
    Direction,
    EdgeArray,
    EdgeData,
    EdgesKey,
    Kind,
    Matrix,
    Pull,
    Stage,
    Topology,
    Workload,
    results_at_once,
)
from ooc.stages import StageBuilder, Step
from ooc.stages.edge_counts import EdgeCounts
from ooc.storage.array import Array
from ooc.storage.store import Store
from ooc.storage.types import features_name
from ooc.storage.versioned_array import VersionedArray

_NUMBERS_PER_PARAMETER = 5
"""Numbers per parameter: itself, its gradient, two of the optimizer's, and one more while the optimizer steps."""

TASKS_AHEAD = 3
"""Tiles in progress or waiting, per worker, so that workers stay busy while one thread moves blocks for the next
step."""
_MOST_WAITING_BYTES = 4 << 20
"""The most bytes of waiting results. Where a tile's gradients are so large that they would exceed it, fewer tiles wait,
down to one per worker; the cost in time was not measured."""

LABELS = ("y", "split/train", "split/valid", "split/test")


def store_matrices(store: Store) -> tuple[str, ...]:
    """Return the store's matrices that stages load."""
    return (*map(features_name, [""] if store.types is None else store.types.nodes), *LABELS)


def matrix_columns(network: Network, store: Store) -> dict[str, int]:
    """Return the columns of the matrices that exist before any stage."""
    features = {"": store.num_features} if store.types is None else store.types.features
    columns = {name: 1 for name in LABELS} | {"y": store.array("y").columns}
    columns |= {features_name(space): width for space, width in features.items()}
    return columns | {network.first_aggregation(s): features[ends_of(s)[0]] for s in network.aggregated_once}


def describe_workload(
    network: Network,
    builder: StageBuilder,
    store: Store,
    arrays: Mapping[str, Array],
    counts: EdgeCounts,
    *,
    tile_rows: int,
    fixed_host_bytes: int,
    spill_dtype: torch.dtype,
    threads: int,
    steps: Mapping[str, Sequence[Step]],
) -> Workload:
    """Return the stages of the programs ``steps``, the matrices they name, and the topology by tile."""
    programs = {name: tuple(step.spec for step in program) for name, program in steps.items()}
    every = [stage for stages in programs.values() for stage in stages]
    pulls = [(stage, stage.pull) for stage in every if stage.pull is not None]
    lasting = {name for stage in programs.get("prepare", ()) for name in stage.stores}
    itemsize = network.dtype.itemsize
    matrices = _matrices(every, builder, store, arrays, lasting, itemsize, spill_dtype.itemsize)
    bucketing: dict[EdgesKey, Bucketing] = {}
    for direction in () if builder.on_device else [pull.direction for _, pull in pulls if pull.is_opaque]:
        backward = reverse_of(store, direction)
        if backward is not None:
            gathered = partial(counts.gathered, direction)
            gathers_own = not are_between_types(store, direction)
            bucketing[direction] = Bucketing(backward, gathered, direction.of_edges, gathers_own)
    scattering = {
        name: (pull.direction, stage.rows, pull.per_edge)
        for stage, pull in pulls
        if pull.direction.of_edges or reverse_of(store, pull.direction)
        for name in pull.added_to
    }
    topologies = _topologies(every, bucketing, store, counts, tile_rows)
    gradient_bytes = builder.most_gradients * itemsize
    waiting_bytes = gradient_bytes + max((_scattered_bytes(*one, topologies, tile_rows) for one in pulls), default=0)
    ahead = max(threads, min(TASKS_AHEAD * threads, _MOST_WAITING_BYTES // max(1, waiting_bytes)))
    results = results_at_once(threads, ahead)
    return Workload(
        rows=max(store.node_counts.values()),
        tile_rows=tile_rows,
        matrices=matrices,
        programs=programs,
        topologies=topologies,
        fixed_host_bytes=fixed_host_bytes,
        fixed_device_bytes=_parameter_bytes(network) + (results + builder.panels_held) * gradient_bytes,
        pulled_itemsize=itemsize,
        threads=threads,
        tasks_ahead=ahead,
        # Weights have the dtype of the sums, and would be rounded to it.
        sums_as_kept=sums_rows_of(spill_dtype, network.dtype) and not any(s.basic.weighted for s in network.scalings),
        dtype=str(network.dtype).removeprefix("torch."),
        recomputed=tuple(
            Matrix(name, height, columns, itemsize, Kind.SCRATCH)
            for name, (height, columns) in builder.recomputed.items()
        ),
        kept=builder.kept,
        scatter_counts={
            name: counts.scattered(
                direction, rows, matrices[name].rows, tile_rows, kind.edges_at_once, kind.pads, kind.apart
            )
            for name, (direction, rows, kind) in scattering.items()
            if kind is not None
        },
        parts=memory.sums(itemsize) if builder.on_device else None,
        bucketing=bucketing,
        line_bytes=LINE_BYTES if are_compiled() and not builder.on_device else 1,
    )


def _parameter_bytes(network: Network) -> int:
    """Return the model's bytes, independent of a plan: parameters with all that belongs to them, and the network's
    data."""
    parameters, idle = (sum(p.numel() for p in found) for found in (network.parameters, network.idle))
    kept = network.rounded_nbytes + network.made_nbytes + network.statistics_nbytes
    return (_NUMBERS_PER_PARAMETER * parameters + idle) * network.dtype.itemsize + kept


def _matrices(
    every: Sequence[Stage],
    builder: StageBuilder,
    store: Store,
    arrays: Mapping[str, Array],
    lasting: Collection[str],
    itemsize: int,
    spilled_itemsize: int,
) -> dict[str, Matrix]:
    """Return the matrices that the stages name, the store's first. ``lasting`` ones outlive the run and are never
    rounded."""
    used = {n for s in every for n in (*s.loads, *s.writes, *((s.pull.source,) if s.pull else ()))}
    read_rows = {name: rows for name, rows in builder.read_rows.items() if name not in lasting}
    height = {name: _stored_rows(name, every, read_rows) for s in every for name in s.stores}
    height |= {name: read_rows[name] for s in every if s.pull is not None for name in s.pull.added_to}
    spaces = {n: s.space for s in every for n in (*s.loads, *s.stores, *(s.pull.own if s.pull else ()))}
    spaces |= {n: spaces[s.pull.source] for s in every if s.pull is not None for n in s.pull.added_to}
    matrices, of_store = {}, store_matrices(store)
    for name in sorted(used, key=lambda name: (name not in of_store, name)):
        columns, space = builder.columns[name], spaces[name]
        if name in arrays:
            array = arrays[name]
            kind = Kind.LEARNT if isinstance(array, VersionedArray) else Kind.STORE
            matrices[name] = Matrix(name, array.shape[0], columns, array.itemsize, kind, space)
        elif name in builder.packed:
            matrices[name] = Matrix(name, height[name], columns, 1, Kind.BITS, space)
        else:
            kind = Kind.CONSTANT if name.startswith("ax") else Kind.SCRATCH
            stored = itemsize if name in lasting else spilled_itemsize
            matrices[name] = Matrix(name, height[name], columns, stored, kind, space)
    return matrices


def _scattered_bytes(stage: Stage, pull: Pull, topologies: Mapping[EdgesKey, Topology], tile_rows: int) -> int:
    """Return the bytes of what a pull scatters, for the largest tile."""
    if pull.per_edge is None:
        return 0
    edges = most_edges(topologies[pull.direction], tile_rows, stage.rows, tile_rows)
    return pull.per_edge.waiting_nbytes(edges, tile_rows)


def _topologies(
    every: Sequence[Stage],
    bucketing: Mapping[EdgesKey, Bucketing],
    store: Store,
    counts: EdgeCounts,
    tile_rows: int,
) -> dict[EdgesKey, Topology]:
    """Return the neighbour lists that the stages pull along, with edge data."""
    pulled: dict[EdgesKey, set[EdgeData]] = {}
    for stage in every:
        if stage.pull is not None:
            pulled.setdefault(stage.pull.direction, set()).update(stage.pull.edge_data)
    for found in bucketing.values():
        pulled.setdefault(found.direction, set())
    if any(stage.entry_bytes for stage in every):
        pulled[Direction.FEATURES] = {EdgeData.WEIGHT}
    return {
        d: Topology(
            d,
            store.topology(d.value)[1].itemsize,
            counts.of_tiles(d, tile_rows),
            {
                data: EdgeArray(array.columns, array.itemsize)
                for data, array in ((data, edge_array(store, d, data)) for data in EdgeData if data in pulled[d])
            },
        )
        for d in sorted(pulled, key=_sort_key)
    }


def _sort_key(key: EdgesKey) -> tuple[int, str]:
    """Return the sort key of a topology."""
    return ([*Direction].index(key), "") if isinstance(key, Direction) else (len(Direction), key.value)


def edge_array(store: Store, direction: EdgesKey, data: EdgeData) -> Array:
    """Return the edge data of the store in the order of ``direction``; for sparse features, their values."""
    if direction is Direction.FEATURES:
        return store.edge_data(direction.value)[0]
    return (store.edge_weight if data is EdgeData.WEIGHT else store.edge_features)(direction.value)


def _stored_rows(name: str, stages: Sequence[Stage], read_rows: Mapping[str, int]) -> int:
    """Return the rows of a matrix that ``stages`` store; of a matrix that is only loaded, those that they need."""
    stored = max(s.rows for s in stages if name in s.stores)
    pulled = any(s.pull is not None and name == s.pull.source for s in stages)
    return stored if pulled else min(stored, read_rows.get(name, stored))


def zero_gradients(network: Network) -> None:
    """Give every parameter that affects the output a zero gradient, allocated once, and the others none."""
    for parameter in network.idle:
        parameter.grad = None
    for parameter in network.parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def drop_gradients_cut_off(network: Network) -> None:
    """Remove gradients where autograd would leave none: see ``Network.cut_off``."""
    for parameter in network.cut_off:
        parameter.grad = None
