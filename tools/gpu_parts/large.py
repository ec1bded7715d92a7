# SPDX-License-Identifier: Apache-2.0
"""A graph shaped like ogbn-papers100M, a part of it as large: forecasts beforehand, then epochs of three-layer GCN."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from gpu_parts.epochs import MOVED
from ooc.plan import Hardware, Limits
from ooc.plan.graphs import KNOWN, GraphStatistics
from ooc.plan.simulate.simulator import simulate
from ooc.prefetch.device import Device
from ooc.storage.store import Store
from ooc.train.metrics import Metric
from ooc.train.resources import Resources
from ooc.train.setup import prepare
from ooc.train.trainer import Trainer

PAPERS = KNOWN["ogbn-papers100M"]
BUDGETS = Limits(8 * 10**9, 16 * 10**9)
LARGER = Limits(40 * 10**9, 512 * 10**9)
"""What the whole graph is forecast for as well."""
EPOCHS = 3
"""The first reads what later ones find in memory."""


def scaled(scale: float) -> GraphStatistics:
    """``scale`` of its nodes, of its edges, and of its labelled nodes."""
    nodes, edges, labelled = (round(scale * count) for count in (PAPERS.nodes, PAPERS.edges, PAPERS.labelled))
    return replace(PAPERS, nodes=nodes, edges=edges, labelled=labelled)


def source_of(graph: GraphStatistics) -> str:
    """Synthetic; of the labelled nodes as many are trained on as in papers100M."""
    return (
        f"synthetic:nodes={graph.nodes},edges={graph.edges},features={graph.features},classes={graph.classes},"
        f"labelled={graph.labelled / graph.nodes:.6f},train=0.78,directed=1"
    )


def model_of(hidden: int) -> Any:
    from torch_geometric.nn.models import GCN

    torch.manual_seed(0)
    return GCN(PAPERS.features, hidden, 3, PAPERS.classes)


def forecasts(
    store: Store, hidden: int, device: Device, hardware: Hardware, limits: Limits, *, whole: GraphStatistics
) -> dict[str, Any]:
    """Of an epoch on ``store`` within ``limits``; on the ``whole`` graph, which is not here, within ``BUDGETS``; and
    within ``LARGER``."""
    asked: dict[str, tuple[Store | GraphStatistics, Limits]] = {
        "this graph": (store, limits),
        "the whole graph": (whole, BUDGETS),
        "the whole graph, 40G and 512G": (whole, LARGER),
    }
    return {"by": hardware.source} | {name: _forecast(*of, hidden, device, hardware) for name, of in asked.items()}


def _forecast(
    graph: Store | GraphStatistics, limits: Limits, hidden: int, device: Device, hardware: Hardware
) -> dict[str, Any]:
    resources = Resources.parse(limits.device_bytes, limits.host_bytes, device=device, hardware=hardware)
    workload, plan = prepare(model_of(hidden), graph, resources, metric=Metric.ACCURACY).plan(limits, hardware)
    timeline = simulate(plan, workload, hardware)
    return {
        "budgets": {"gpu": limits.device_bytes, "host": limits.host_bytes},
        "seconds": timeline.epoch_s,
        "busy_s": {resource.value: seconds for resource, seconds in timeline.busy_s.items()},
        **{name: getattr(plan, name) for name in MOVED},
    }


def epochs(
    store: Store, hidden: int, device: Device, hardware: Hardware, limits: Limits, *, folder: Path, limit_s: float
) -> dict[str, Any]:
    """Up to ``EPOCHS`` epochs, as many as end within ``limit_s`` by what the last one took; seconds of each, and what
    the last one moved. The first aggregation, made once, is told apart."""
    model = model_of(hidden)
    begun_s = monotonic()
    with Trainer(
        model, store, limits.device_bytes, limits.host_bytes, device, spill_dir=folder, hardware=hardware
    ) as trainer:
        forecast_s = simulate(trainer.plan, trainer.workload, hardware).epoch_s
        records = list(_while_there_is_time(trainer, begun_s + limit_s))
        spilled = trainer.plan.spill_bytes
    last = records[-1]
    return {
        "budgets": {"gpu": limits.device_bytes, "host": limits.host_bytes},
        "nodes": store.num_nodes,
        "edges": store.num_edges,
        "forecast": {"seconds": forecast_s, "by": hardware.source},
        "ooc": {"seconds": last.time_s},
        "epochs_s": [record.time_s for record in records],
        "before_and_between_s": monotonic() - begun_s - sum(record.time_s for record in records),
        "loss": [record.loss for record in records],
        **{name: getattr(last, name) for name in MOVED},
        "spill_bytes": spilled,
        "ssd_way": last.ssd_way,
    }


def _while_there_is_time(trainer: Trainer, until_s: float) -> Iterator[Any]:
    for _ in range(EPOCHS):
        (record,) = trainer.fit(1, eval_every=0)
        yield record
        if monotonic() + 1.2 * record.time_s > until_s:
            return
