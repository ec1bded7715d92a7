# SPDX-License-Identifier: Apache-2.0
"""From a model, a graph and resources to a job: everything that is checked and decided before any data is moved.

``prepare`` lowers a model for training; the resulting job plans for any machine and budgets (``ooc.train.job``), and
for each of several processes (``ooc.train.sharing``).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ooc.engine.workers import one_thread
from ooc.errors import ModelError, OptionError, StoreError
from ooc.model.graph import ActiveRows, AnyScaling, GraphRows, RelationScaling, ends_of, most_edges
from ooc.model.lowering.assembly import Inputs, Results, Setting
from ooc.model.lowering.network import Network, dtype_of, lower
from ooc.model.lowering.products import IN_FULL, Products
from ooc.plan.graphs import GraphStatistics
from ooc.plan.workload import Direction, EdgeData
from ooc.stages import StageBuilder, Step
from ooc.stages.edge_counts import EdgeCounts
from ooc.stages.workload import matrix_columns
from ooc.storage.store import Store, Task
from ooc.suggestions import check_choice
from ooc.train.embedding import LearntRows
from ooc.train.job import Job, store_of_statistics
from ooc.train.loss import RowsLoss, resolve_loss, takes_results
from ooc.train.metrics import Metric, make_scorer
from ooc.train.objective import Objective, no_objective
from ooc.train.optimizer_state import WHERE, StateOnDisk, why_in_memory
from ooc.train.resources import CPU, Resources
from ooc.train.schedule import Averaging
from ooc.train.sharing import SharedJob

IGNORABLE = ("none", *(data.value for data in EdgeData), "all")
"""The edge data that may be ignored."""

_LABELS = ("y", "train_mask", "val_mask", "test_mask")
_DEVICE_BYTES_PER_EDGE = 34
"""Bytes that a device takes per edge of a tile in a pass that sums: concatenated indices, parts of long rows,
blocks."""
_PULL_BYTES = 16, 10
"""Bytes per row and per edge that a kernel pulls, beside its result: offsets, indices, parts of long rows."""
_WIDENING_RATIO = 5, 4
"""A ratio: the total with a frame that is being widened, to what is pulled."""


class Saving(Enum):
    """Optimisations that leave out work without changing any result."""

    FIRST_AGGREGATION = "first aggregation once"
    """A(X) of constant features is computed once instead of in every epoch."""
    ACTIVE_ROWS = "active rows"
    """In a store in hop order, only rows that can reach a scored row are computed."""
    SHARED_FORWARD = "one forward pass to score and to train"
    """Without dropout, the forward pass that scores an epoch's weights is also the next epoch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Options for tests and measurements.

    ``tile_rows``: rows computed at once, whose sums are added in that order (None: depends on the model's widths).
    ``savings``: the optimisations in use, which change no result.
    """

    tile_rows: int | None = None
    savings: Collection[Saving] = tuple(Saving)


def prepare(
    model: nn.Module,
    graph: Store | GraphStatistics,
    resources: Resources,
    *,
    metric: Metric | None = None,
    loss: RowsLoss | None = None,
    flat_labels: bool | None = None,
    objective: Objective | None = None,
    averaging: Averaging | None = None,
    input_dropout: float = 0.0,
    ignore_edge_data: str = "none",
    compute_dtype: str = "float32",
    seed: int = 0,
    savings: Collection[Saving] = tuple(Saving),
    optimizer: Callable[[], torch.optim.Optimizer] | None = None,
    optimizer_options: Sequence[Mapping[str, Any]] = (),
    optimizer_state: str = "memory",
    state_folder: Path | None = None,
    scoring_only: bool = False,
    learnt: LearntRows | None = None,
    outputs_of: tuple[str, ...] = (),
) -> Job:
    """Return the job of training ``model`` on ``graph``: a store, or the statistics of a graph that is not present.

    Arguments as in ``Trainer``. ``optimizer`` makes the optimizer where its state has to be known;
    ``optimizer_options`` are its options by group; ``state_folder``: the run's folder for it. ``objective`` replaces
    ``loss`` and ``metric`` of nodes. ``scoring_only``: training is done elsewhere, and the program ``train`` scores.
    ``learnt``: the trained embedding, if any. ``outputs_of``: see ``Setting``. ModelError for what cannot be run
    exactly.
    """
    store = graph if isinstance(graph, Store) else store_of_statistics(graph)
    store.check_one_graph("training of the full graph", takes_types=True)
    if objective is None and not store.split_sizes["train"]:
        raise StoreError(
            f"{store.path} has no training nodes: it was made without labels (y) and splits; links can be trained"
        )
    averaging = averaging or Averaging(model, None, 1)
    if learnt is not None:
        _check_embedding(resources, averaging)
    takes_all = objective is not None or takes_results(loss)
    setting = setting_of(
        store,
        dtype_of(model),
        ignore_edge_data=ignore_edge_data,
        learnt=learnt,
        input_dropout=input_dropout,
        product=_products(compute_dtype),
        outputs_of=outputs_of,
        results=Results.ALL if takes_all else Results.FIRST,
    )
    resources, network, active = lower_model(
        model, store, resources, setting, savings=savings, of_classes=not takes_all, trains=not scoring_only
    )
    if learnt is not None:
        learnt.keep(network.learnt)
    if objective is None:
        of_rows = resolve_loss(
            loss,
            store,
            columns=network.result_columns or (network.training.columns,),
            dtype=network.dtype,
            place=resources.place,
            flat_outputs=network.flat_result,
            flat_labels=flat_labels,
        )
        objective = Objective(
            store,
            of_rows,
            make_scorer(store, metric, rows=active.scoring[0], outputs=network.outputs, dtype=network.dtype),
            tile_rows=resources.tile_rows,
        )
    check_choice("optimizer state", optimizer_state, WHERE)
    state = None
    if optimizer is not None and not scoring_only:
        state = partial(_state_on_disk, network, resources, optimizer, optimizer_state, state_folder)
    # Where scoring and training compute the same, one pass serves both; not where weights are averaged.
    both = Saving.SHARED_FORWARD in savings and network.same_in_evaluation and not (averaging.active or scoring_only)

    def programs(builder: StageBuilder) -> dict[str, list[Step]]:
        train = builder.evaluate() if scoring_only else builder.train()
        found = {"prepare": builder.prepare(), "train": train, "evaluate": builder.evaluate()}
        return found | {"train_and_score": builder.train_and_score()} if both else found

    host_bytes, device_bytes = objective.memory_bytes(store, on_device=resources.on_device)
    kind = Job if resources.ranks.count == 1 else SharedJob
    return kind(
        network,
        store,
        EdgeCounts(graph),
        resources,
        active,
        objective,
        programs,
        seed=seed,
        extra_host_bytes=host_bytes,
        extra_device_bytes=averaging.nbytes + device_bytes + _third_state_bytes(network, optimizer_options),
        learnt=learnt,
        make_state=state,
        state_where=optimizer_state,
    )


def _third_state_bytes(network: Network, options: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of a third number per parameter that some optimizers keep, beside the two that a workload
    counts."""
    if not any(one.get("amsgrad") or (one.get("centered") and one.get("momentum")) for one in options):
        return 0
    return sum(parameter.numel() for parameter in network.parameters) * network.dtype.itemsize


def size_lazy_parameters(model: nn.Module, setting: Setting) -> None:
    """Initialise lazy parameters of ``model``, as in ``SAGEConv((-1, -1), 64)``, from the widths of its inputs.

    ModelError where that is impossible.
    """
    if not any(map(is_lazy, model.parameters())):
        return
    from ooc.model.layers.decoders import LinkPredictor
    from ooc.model.lowering.tracing import initialize  # both import PyG

    if setting.in_columns:  # otherwise nothing can be trained, and a later check says so
        initialize(model.encoder if isinstance(model, LinkPredictor) else model, setting)


def setting_of(
    store: Store,
    dtype: torch.dtype,
    *,
    ignore_edge_data: str = "none",
    learnt: LearntRows | None = None,
    in_batches: bool = False,
    **options: Any,
) -> Setting:
    """Return the setting in which a model is lowered, from the store and ``options``.

    ``dtype``: the dtype it computes in. ``ignore_edge_data``: the ignored edge data (``IGNORABLE``). ``learnt``: the
    trained embedding. ``in_batches``: it runs on edges that are no matrix, which has products and weights.
    """
    x = store.sparse_features
    return Setting(
        num_nodes=store.num_nodes,
        num_edges=store.num_edges,
        num_features=store.num_features,
        edge_data=edge_data_used(store, ignore_edge_data),
        num_edge_features=store.num_edge_features,
        weights_name=str(store.source.get("weights", "edge_weight")),
        adj_t=frozenset(store.source.get("adj_t", ())) - ({"matrix", "weights"} if in_batches else set()),
        left_out=unused_attributes(store),
        inputs=inputs_of(store),
        embedding_columns={} if learnt is None else learnt.widths,
        feature_entries_per_row=None if x is None else x.entries / store.num_nodes,
        most_edges=cache(lambda relation: inf if "statistics" in store.source else most_edges(store, relation)),
        types=store.types,
        dtype=dtype,
        **options,
    )


def lower_model(
    model: nn.Module,
    store: Store,
    given: Resources,
    setting: Setting,
    *,
    savings: Collection[Saving],
    of_classes: bool = True,
    trains: bool = True,
) -> tuple[Resources, Network, ActiveRows]:
    """Return the resources with the rows of a tile, the network of ``model`` in a ``setting``, and the rows to compute.

    ModelError for what cannot be run. ``of_classes``: there must be an output for every class. ``trains``: a model with
    nothing to train is refused.
    """
    if store.types is not None and given.on_device:
        raise OptionError(f"{store.path} has several types of nodes or edges, which are not trained with a GPU")
    features = (store.num_features,) if store.types is None else store.types.features.values()
    if not any(features) and not setting.embedding_columns:
        raise ModelError(f"the nodes of {store.path} have no features; train an embedding of them, embedding=64")
    size_lazy_parameters(model, setting)

    def active_rows(hops: int) -> ActiveRows:
        if Saving.ACTIVE_ROWS not in savings:
            return ActiveRows.of_store(store, hops, everything=True)
        return rounded_to_tiles(ActiveRows.of_store(store, hops), resources.tile_rows)

    def edges_per_row(scaling: AnyScaling) -> float:
        if store.types is None or not isinstance(scaling, RelationScaling):
            return store.num_edges / store.num_nodes
        return store.types.edges[scaling.relation] / store.types.nodes[ends_of(scaling)[1]]

    setting = replace(setting, aggregate_once=Saving.FIRST_AGGREGATION in savings, on_cpu=not given.on_device)
    classes = store.num_classes if of_classes and store.task is Task.CLASSES else 0
    widest = max(setting.embedding_columns.values(), default=0)
    asked: dict[str, Any] = {"num_classes": classes, "active": active_rows, "edges_per_row": edges_per_row}
    lowered = partial(lower, model, setting, trains=trains, **asked)
    resources = given.for_model(model, store, None, learnt=widest)
    with one_thread():  # layers are run on small graphs: thousands of small operators
        network = lowered()
        known = given.for_model(model, store, network, learnt=widest)
        if known.tile_rows != resources.tile_rows:  # the lowered model needs lower tiles
            resources, network = known, lowered()
    by_rows = given.on_device and not given.tile_rows
    resources = resources.for_rows_of(*_row_bytes(network, store, active_rows(network.hops)) if by_rows else (1, 1))
    return resources, network, active_rows(network.hops)


def _row_bytes(network: Network, store: Store, active: ActiveRows) -> tuple[int, int]:
    """Return the most bytes a device has per row at a time: those it computes in; and blocks of two steps, or the
    edges."""
    builder = StageBuilder(
        network=network,
        rows=GraphRows(),
        objective=no_objective(store, network.outputs),
        columns=matrix_columns(network, store),
        active=active,
        backward_direction=Direction.OUT,
        aggregated=(),
        recomputed_stages=(),
        seed=0,
        place=CPU,
        on_device=True,
        sparse="x" if store.sparse_features is not None else None,
    )
    stages = [step.spec for step in (*builder.prepare(), *builder.train())]
    moved = max(sum(builder.columns[name] for name in (*stage.loads, *stage.stores)) for stage in stages)
    edges = ceil(store.num_edges / store.num_nodes)
    of_row, of_edge = _PULL_BYTES
    kinds = (stage.pull.per_edge for stage in stages if stage.pull is not None)
    pulled = max((kind.bytes_per_row // kind.groups + of_row + of_edge * edges for kind in kinds if kind), default=0)
    computed = max(
        *(stage.scratch_bytes_per_row for stage in stages), pulled * _WIDENING_RATIO[0] // _WIDENING_RATIO[1]
    )
    return computed, max(2 * moved * network.dtype.itemsize, _DEVICE_BYTES_PER_EDGE * edges)


def edge_data_used(store: Store, ignore: str) -> frozenset[EdgeData]:
    """Return the store's edge data except what is ignored; raise OptionError for a value not in ``IGNORABLE``."""
    check_choice("edge data to ignore", ignore, IGNORABLE)
    carried = {EdgeData.WEIGHT: store.has_edge_weight, EdgeData.FEATURES: store.num_edge_features > 0}
    if store.types is not None:
        carried[EdgeData.FEATURES] = bool(store.types.edge_features)
    return frozenset(data for data in EdgeData if carried[data] and ignore not in ("all", data.value))


def inputs_of(store: Store, takes: Collection[str] | None = None, kind: str = "inputs") -> Inputs:
    """Return the model inputs concatenated in the store's features, if described, or in its edge data.

    Inputs that a model does not take (None: it takes all) have no name.
    """
    said = store.source.get(kind, ())
    return [(name if takes is None or name in takes else "", columns, whole) for name, columns, whole in said]


def unused_attributes(store: Store) -> dict[str, frozenset[str]]:
    """Return, by node type, the attributes that the source data has and no model is given."""
    types = store.types
    usual = {"": _LABELS} if types is None else {k: _LABELS if k == types.labelled else () for k in types.nodes}
    return {kind: frozenset(names) for kind, names in store.source.get("left_out") or usual.items()}


def rounded_to_tiles(active: ActiveRows, tile_rows: int) -> ActiveRows:
    """Return ``active`` with row counts rounded up to whole tiles.

    Thus every program divides shared rows into the same tiles and gets the same bits. The results of added rows are
    wrong and reach no other row.
    """

    def up(rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(active.nodes, -(-count // tile_rows) * tile_rows) for count in rows)

    others = {name: rounded_to_tiles(one, tile_rows) for name, one in active.others.items()}
    return replace(active, training=up(active.training), scoring=up(active.scoring), others=others)


# ---- checks ------------------------------------------------------------------------------------------------


def check_model(model: object, graph: object) -> None:
    """Raise ModelError for an object that is no model, for instance where the graph was given first."""
    if not isinstance(model, nn.Module):
        kind = "the class" if isinstance(model, type) else "of type"
        given = model if isinstance(model, type) else type(model)
        remedy = "the model comes first, the graph behind it" if isinstance(graph, nn.Module) else "make one: Model(…)"
        raise ModelError(f"the model must be a torch.nn.Module, and is {kind} {given.__name__}; {remedy}")


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise OptionError for an object that is no optimizer, ModelError for one that could not step this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer {optimizer!r:.40} is none of torch's; give torch.optim.Adam(model.parameters())")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("optimizer LBFGS evaluates the loss several times a step, which is not supported")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError("optimizer SparseAdam takes sparse gradients only, these are dense; use Adam")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ModelError(f"optimizer {type(optimizer).__name__} holds parameters that are not the model's")


def _check_embedding(resources: Resources, averaging: Averaging) -> None:
    """Raise OptionError for options that an embedding cannot be trained with."""
    narrower = resources.spill_dtype not in (None, torch.float32, torch.float64)
    refused = {
        "on a GPU": resources.on_device,
        "with averaged weights": averaging.active,
        "with a narrower spill_dtype": narrower,
    }
    for how, asked in refused.items():
        if asked:
            raise OptionError(f"an embedding is not trained {how}; leave out one of the two")


def _state_on_disk(
    network: Network,
    resources: Resources,
    make_optimizer: Callable[[], torch.optim.Optimizer],
    where: str,
    folder: Path | None,
) -> StateOnDisk | None:
    """Return the optimizer's state, if it may be on the SSD; raise OptionError where it should be there and cannot."""
    optimizer = make_optimizer()
    if where != "ssd" and why_in_memory(optimizer) is not None:
        return None
    cut_off = {id(parameter) for parameter in network.cut_off}
    stepped = [parameter for parameter in network.parameters if id(parameter) not in cut_off]
    state = StateOnDisk(optimizer, stepped, folder=folder, follows=resources.ranks.rank > 0)
    return state if state.nbytes else None


def _products(name: str) -> Products:
    if name not in ("float32", "bfloat16"):
        why = "; float16 would lose small gradients, bfloat16 has float32's range" if name == "float16" else ""
        raise OptionError(f"compute dtype {name!r} is not one of float32, bfloat16{why}")
    return Products(torch.bfloat16) if name == "bfloat16" else IN_FULL
