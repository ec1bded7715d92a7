# SPDX-License-Identifier: Apache-2.0
"""What training would be: planned for any machine and any budgets, and never run.

The workload is that of ``Trainer``, from the same lowering and the same stages, so that for a store which is there
the plan is the trainer's too. Of the graph, only where the edges of every tile begin is read, and for layers of unknown
insides the in-edges, once, a tile's at a time, and once more where what they gather does not fit in memory; what that
takes beside a tile's edges is a few bytes a node (``ooc.train.gathered_rows``).
"""

from collections.abc import Collection, Sequence

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ooc.plan import Hardware, Limits, Plan, Workload
from ooc.plan.graphs import GraphStatistics
from ooc.plan.workload import Direction
from ooc.storage.store import Store
from ooc.train.averaging import Averaging
from ooc.train.evaluation import make_scorer
from ooc.train.gathered_rows import counted_gathers, most_gathers
from ooc.train.graph import GraphRows, rows_nbytes
from ooc.train.handed_rows import counted_rows, most_rows
from ooc.train.hypothetical import hypothetical_store, spread
from ooc.train.loss import RowsLoss, resolve_loss
from ooc.train.metrics import resolve_metric
from ooc.train.objective import Objective, judging_nbytes
from ooc.train.setup import (
    Drafts,
    Resources,
    Saving,
    admit_rows,
    check_trainable,
    take_apart,
    training_programs,
)
from ooc.train.stages import StageBuilder, Step
from ooc.train.workload import TileEdges

_CHUNK_TILES = 1 << 10
"""Tiles whose offsets are read at a time."""


class Prospect:
    """Training ``model`` on ``graph``: a store, or the statistics of a graph that is not here.

    Arguments as of ``Trainer``; ``resources`` has its options but for budgets and machine. Raises ModelError for what
    cannot be run exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Store | GraphStatistics,
        resources: Resources,
        *,
        loss: RowsLoss | None = None,
        metric: str | None = None,
        average: AveragedModel | None = None,
        input_dropout: float = 0.0,
        savings: Collection[Saving] = tuple(Saving),
        ignore_edge_data: str = "none",
        compute_dtype: str = "float32",
    ) -> None:
        store = graph if isinstance(graph, Store) else hypothetical_store(graph)
        tile_edges = stored(store) if isinstance(graph, Store) else spread(graph)
        check_trainable(store)
        chosen = resolve_metric(metric, store.task, store.num_classes)
        self._averaging = Averaging(model, average, 1)
        self._share_forward = Saving.SHARED_FORWARD in savings
        resources = resources.for_model(model, store)
        network, active = take_apart(
            model,
            store,
            input_dropout=input_dropout,
            tile_rows=resources.tile_rows,
            savings=savings,
            ignore_edge_data=ignore_edge_data,
            compute_dtype=compute_dtype,
        )
        scored, dtype = active.scoring[0], network.dtype
        objective = Objective(
            store.task,
            resolve_loss(loss, store, store.task, outputs=network.outputs, dtype=dtype),
            make_scorer(store, chosen, rows=scored, dtype=dtype),
            tile_rows=resources.tile_rows,
        )
        self._network, self._store = network, store
        on_device = resources.hardware.has_device_memory
        self._extra_host_bytes, judging_device_bytes = judging_nbytes(
            store,
            chosen,
            network,
            rows=scored,
            tile_rows=resources.tile_rows,
            on_device=on_device,
        )
        rows = rows_nbytes(store, network.scalings, dtype.itemsize, on_device=on_device)
        self._drafts = Drafts(
            network,
            store,
            resources,
            active,
            objective,
            self._programs,
            rows=GraphRows(),
            tile_edges=tile_edges,
            handed_rows=counted_rows(store) if isinstance(graph, Store) else most_rows(tile_edges),
            gathered_rows=counted_gathers(store) if isinstance(graph, Store) else most_gathers(tile_edges),
            seed=0,
            fixed_host_bytes=rows + self._extra_host_bytes,
            extra_device_bytes=self._averaging.nbytes + judging_device_bytes + resources.overhead_bytes,
        )

    def _programs(self, builder: StageBuilder) -> dict[str, list[Step]]:
        return training_programs(builder, share_forward=self._share_forward and not self._averaging.active)

    @property
    def workload(self) -> Workload:
        """What is to be done where nothing is computed again."""
        return self._drafts.draft().workload

    def plan(self, limits: Limits, hardware: Hardware) -> tuple[Workload, Plan]:
        """What is to be done, and the verified plan for a machine within ``limits``; BudgetError where there is none,
        with the least budgets that would do."""
        on_device = hardware.has_device_memory
        admit_rows(self._network, self._store, limits, on_device=on_device, extra_host_bytes=self._extra_host_bytes)
        draft, plan = self._drafts.choose(limits, hardware)
        return draft.workload, plan


def stored(store: Store) -> TileEdges:
    """The edges of a store's tiles, read from its offsets, a few at a time."""
    known: dict[tuple[str, int], Sequence[int]] = {}

    def tile_edges(direction: Direction, tile_rows: int) -> Sequence[int]:
        indptr, _ = store.topology(direction.value)
        key = indptr.name, tile_rows
        if key not in known:
            chunk = _CHUNK_TILES * tile_rows
            starts = range(0, store.num_nodes, chunk)
            read = (indptr.read(start, min(start + chunk, store.num_nodes))[::tile_rows] for start in starts)
            known[key] = [*(int(edges) for offsets in read for edges in offsets), store.num_edges]
        return known[key]

    return tile_edges
