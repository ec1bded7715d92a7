# SPDX-License-Identifier: Apache-2.0
"""Training by sampled mini-batches: a step for every batch, or for several, and scores of the full graph.

Batches come from ``ooc.sampling``; the module runs on them as it is. What is scored is the full graph, exactly, by the
program that full-graph training scores with. All is admitted first: the batches and what the layers make of the largest
of them, parameters, what the optimizer keeps, and the plan of scoring.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.errors import ModelError
from ooc.memory import divide_memory
from ooc.model.graph import load_rows, rows_nbytes
from ooc.model.lowering.assembly import Results
from ooc.model.lowering.network import values_of
from ooc.model.lowering.trimming import Trimmed
from ooc.model.lowering.values import Aggregate
from ooc.offloading.measure import META
from ooc.plan.workload import EdgeData
from ooc.sampling.loader import NeighborLoader
from ooc.sampling.normalization import GcnNormalization
from ooc.storage.store import Store, Task
from ooc.train.batched.batches import BatchTrainer
from ooc.train.loss import of_results, resolve_loss, takes_results
from ooc.train.resources import Resources
from ooc.train.setup import Job, Saving, edge_data_used, lower_model, prepare
from ooc.train.trainer import Scores, Trainer

if TYPE_CHECKING:
    from torch_geometric.data import Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How batches are made: the most neighbours that are drawn of a node, by hop (-1: all), the nodes of a batch, and
    the batches of a step."""

    fanouts: Sequence[int]
    batch_size: int
    accumulate: int = 1


class SampledTrainer(BatchTrainer):
    """Trains ``model`` in place by batches that are sampled from ``graph``, within the memory it is given.

    Arguments as of ``Trainer``; ``compute_dtype="bfloat16"`` computes batches by torch's autocast. Where an epoch is
    interrupted, the steps that it has made stay made, but for a run that is gone on with.
    """

    def __init__(
        self, model: nn.Module, graph: "Store | str | Path | Data", sampling: Sampling, **options: Any
    ) -> None:
        self.sampling = sampling
        super().__init__(model, graph, accumulate=sampling.accumulate, **options)

    def _job(self, resources: Resources) -> Job:
        """Batches first; scoring is planned within what they leave when they are over."""
        model, store, sampling = self.model, self.store, self.sampling
        left_out, loss = self._asked["ignore_edge_data"], self._asked["loss"]
        self._input_dropout = self._asked["input_dropout"]
        self._carried = edge_data_used(store, left_out)
        results = Results.ALL if takes_results(loss) else Results.FIRST
        options = {"ignore_edge_data": left_out, "results": results}
        _, network, _ = lower_model(model, store, resources, input_dropout=0.0, savings=(), **options)
        if any(isinstance(value, Aggregate) and value.scaling.reversed for value in values_of(network.training)):
            raise ModelError("sums against the edges need out-edges, and a batch has in-edges of its nodes only")
        normalized, self._dtype = [scaling for scaling in network.scalings if scaling.normalized], network.dtype
        self._normalization = GcnNormalization(model, {})  # refuses what it cannot do before anything is read
        self._scored_columns, self._takes_results = network.outputs, bool(network.result_columns)
        columns = network.result_columns or (network.training.columns,)
        self._loss = resolve_loss(loss, store, columns=columns, dtype=network.dtype)
        self._rows_bytes = rows_nbytes(store, normalized, network.dtype.itemsize, on_device=False) if normalized else 0
        loading = self._loading(model, resources, self._asked["seed"])
        self._trims = False
        if (trimmed := Trimmed.of(model, network)) is not None:
            self.batch_model = trimmed
        else:
            self._trims = _trims(model, sampling.fanouts, self._carried)
        drawn = store, sampling.fanouts, sampling.batch_size
        self.loader = self._batches = NeighborLoader(*drawn, input_nodes="train", **loading)
        self._batches_bytes = self.loader.plan.nbytes
        if normalized:
            scalings = load_rows(store, normalized, network.dtype, on_device=False).scalings
            self._normalization = GcnNormalization(model, scalings)
        device_bytes, host_bytes = divide_memory(self.memory_bytes - self.loader.retained_bytes - self._rows_bytes)
        limits = replace(resources.limits, device_bytes=device_bytes, host_bytes=host_bytes)
        own = {"savings": (Saving.ACTIVE_ROWS,), "scoring_only": True, "compute_dtype": "float32"}
        return prepare(model, store, replace(resources, limits=limits), **self._asked | own)

    @property
    def _both_fit(self) -> bool:
        """Whether batches and scoring may be in memory at once."""
        plan = self._prepared.plan
        return self.loader.plan.nbytes + plan.device_peak_bytes + plan.host_peak_bytes <= self.memory_bytes

    def _make_room(self) -> None:
        if not self._both_fit:
            self._session.close()

    def _scale(self, epoch: int, first: int, last: int) -> float:
        rows, size = self.store.split_sizes["train"], self.loader.batch_size
        rows_of_step = min((last - first) * size, rows - first * size)
        return rows / (self._loss.divisor * rows_of_step)

    def _accumulate(self, batch: "Data", scale: float) -> float:
        size = batch.batch_size
        with self._normalized(self.model, batch):
            with self._autocast():
                outputs_rC = self._outputs(self.batch_model, batch)[:size].to(self._dtype)
            labels_rL = batch.y[:size, None] if self.store.task is Task.CLASSES else batch.y[:size]
            labels = self._targets.of(
                "train", labels_rL, torch.arange(size), outputs=outputs_rC[:, : self._scored_columns]
            )
            return self._backward(outputs_rC, labels, scale)

    def _normalized(self, model: nn.Module, batch: "Data") -> AbstractContextManager[None]:
        """Layers take the degrees of the full graph: around both passes, since either may run them."""
        on_meta = batch.x.is_meta
        normalization = GcnNormalization(model, {}) if on_meta else self._normalization
        degrees = batch.row_id if on_meta else torch.from_numpy(self.loader.in_degrees(batch.row_id.numpy()))
        return normalization.applied(batch.row_id, degrees, batch.edge_index)

    def _outputs(self, model: nn.Module, batch: "Data") -> Tensor:
        """What the model gives for a batch's seeds, and maybe for nodes that lie further out."""
        x = F.dropout(batch.x.to(self._dtype), self._input_dropout, training=True)
        given: dict[str, Any] = {}
        if EdgeData.WEIGHT in self._carried:
            given["edge_weight"] = batch.edge_weight.to(self._dtype)
        if EdgeData.FEATURES in self._carried:
            given["edge_attr"] = batch.edge_attr.to(self._dtype)
        if isinstance(model, Trimmed):
            carried = given.get("edge_weight"), given.get("edge_attr")
            trimmed: Tensor = model(x, batch.edge_index, *carried, batch.num_sampled_nodes, batch.num_sampled_edges)
            return trimmed
        if self._trims:
            given["num_sampled_nodes_per_hop"] = batch.num_sampled_nodes
            given["num_sampled_edges_per_hop"] = batch.num_sampled_edges
        return of_results(model(x, batch.edge_index, **given), every=self._takes_results)

    def _evaluate(self) -> Scores:
        if self._both_fit:
            return Trainer.evaluate(self)
        self.loader.close()
        try:
            return Trainer.evaluate(self)
        finally:
            self._session.close()

    def _start(self) -> None:
        if self.ranks.rank:  # the first scores
            self._snapshot.check()
        else:
            super()._start()

    # ---- memory, and the end -----------------------------------------------------------------------------------

    def _model_bytes(self, most: list[tuple[int, int]], left: int) -> int:
        """Of batches that have so many nodes and edges after each hop at most."""
        from torch_geometric.data import Data

        kept = self._kept_bytes() + self._rows_bytes
        (nodes, edges), before = most[-1], [(0, 0), *most]
        sizes = [(now[0] - then[0], now[1] - then[1]) for now, then in zip(most, before, strict=False)]
        whole = partial(torch.empty, dtype=torch.int64, device=META)
        real = partial(torch.empty, dtype=self._dtype, device=META)
        batch = Data(
            x=real(nodes, self.store.num_features),
            edge_index=whole(2, edges),
            edge_weight=real(edges),
            edge_attr=real(edges, self.store.num_edge_features),
            row_id=whole(nodes),
            num_sampled_nodes=[count for count, _ in sizes],
            num_sampled_edges=[count for _, count in sizes][1:],
        )
        given = [value for value in batch.to_dict().values() if isinstance(value, Tensor)]
        step = lambda model: self._outputs(model, batch)[: most[0][0]]  # noqa: E731
        return kept + self._step_bytes(step, given, left - kept, partial(self._normalized, batch=batch))

    def predict(self, *given: Any, **named: Any) -> Tensor | None:
        """As ``Trainer.predict``."""
        self.loader.close()
        return super().predict(*given, **named)


def _trims(model: nn.Module, fanouts: Sequence[int], carried: frozenset[EdgeData]) -> bool:
    """Whether PyG's ``trim_to_layer`` leaves out what later layers do not read, of a model of its own; norms over nodes
    then take their statistics of what is left."""
    plain = isinstance(model, BasicGNN) and getattr(model, "jk_mode", None) is None and len(carried) < len(EdgeData)
    return plain and len(fanouts) >= int(getattr(model, "num_layers", 0))
