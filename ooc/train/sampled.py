# SPDX-License-Identifier: Apache-2.0
"""Training by sampled mini-batches: a step for every batch, or for several, and scores of the full graph.

Batches come from ``ooc.sampling``; the module runs on them as it is. What is scored is the full graph, exactly, by the
program that full-graph training scores with. All is admitted first: the batches and what the layers make of the largest
of them, parameters, what the optimizer keeps, and the plan of scoring.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.engine.record import EpochRecord
from ooc.errors import BudgetError, ModelError, OptionError
from ooc.events import Note, reported
from ooc.kernels.dropout.edges import key_of
from ooc.memory import divide_memory
from ooc.model.graph import load_rows, rows_nbytes
from ooc.model.task import Targets
from ooc.offloading.measure import DryRuns, SavingPlan
from ooc.offloading.offload import Offload
from ooc.plan.workload import EdgeData, Fate
from ooc.ranks import RunningStatistics, StepSum
from ooc.sampling.loader import NeighborLoader
from ooc.sampling.normalization import GcnNormalization
from ooc.sizes import format_size
from ooc.storage.store import Store, Task
from ooc.train.loss import resolve_loss
from ooc.train.resources import Resources
from ooc.train.setup import Job, Saving, edge_data_used, lower_model
from ooc.train.trainer import Scores, Trainer

if TYPE_CHECKING:
    from torch_geometric.data import Data

_DROPOUT = 2**33
"""Beside seed, epoch and batch in the key of what the layers draw."""
_FULL_GRAPH = {"device": ("auto", "cpu"), "spill_dtype": (None, "float32", "float64"), "embedding": (None,)}
_AUTOCAST_SHARE = 1.5
"""What a step may take with autocast of what it takes without, as rounded copies come on top; of five models of two to
five layers it was 0.8 to 1.13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How batches are made: the most neighbours that are drawn of a node, by hop (-1: all), the nodes of a batch, and
    the batches of a step."""

    fanouts: Sequence[int]
    batch_size: int
    accumulate: int = 1


class SampledTrainer(Trainer):
    """Trains ``model`` in place by batches that are sampled from ``graph``, within the memory it is given.

    Arguments as of ``Trainer``; ``compute_dtype="bfloat16"`` computes batches by torch's autocast. The loss of an epoch
    is the mean over its training rows, each as its batch's step found it. Gradients of several batches of a step are
    those of one batch of all their rows. Where an epoch is interrupted, the steps that it has made stay made, but for a
    run that is gone on with.

    Where ``torchrun`` has started several processes, each computes a share of every step's batches, and all make the
    same steps; their number changes no result. ``memory`` is that of all processes of a machine. The first one scores,
    and writes the run.
    """

    def __init__(
        self, model: nn.Module, graph: "Store | str | Path | Data", sampling: Sampling, **options: Any
    ) -> None:
        for name, values in _FULL_GRAPH.items():
            if options.get(name, values[0]) not in values:
                raise OptionError(f"{name}={options[name]!r} is of full-graph training, not of batches")
        self.sampling, self._is_rounded = sampling, options.get("compute_dtype") == "bfloat16"
        super().__init__(model, graph, **options)

    def _job(self, make: partial[Job], resources: Resources) -> Job:
        """Batches first; scoring is planned within what they leave when they are over."""
        model, store, sampling = self.model, self.store, self.sampling
        if self.ranks.count > sampling.accumulate:
            raise OptionError(
                f"a step of {sampling.accumulate} batches has none for some of {self.ranks.count} processes; give "
                f"accumulate={self.ranks.count} or more (the batches of a step, of all processes together)"
            )
        left_out, loss = make.keywords["ignore_edge_data"], make.keywords["loss"]
        self._seed, self._input_dropout = make.keywords["seed"], make.keywords["input_dropout"]
        self.memory_bytes = resources.limits.memory_bytes // self.ranks.local_count
        self._statistics = RunningStatistics(model, self.ranks)
        self._listener, self._hardware, self._scratch = resources.listener, resources.hardware, resources.spill_dir
        self._saving: SavingPlan | None = None
        self._carried = edge_data_used(store, left_out)
        _, network, _ = lower_model(model, store, resources, input_dropout=0.0, savings=(), ignore_edge_data=left_out)
        if any(scaling.reversed for scaling in network.scalings):
            raise ModelError("sums against the edges need out-edges, and a batch has in-edges of its nodes only")
        normalized, self._dtype = [scaling for scaling in network.scalings if scaling.normalized], network.dtype
        self._normalization = GcnNormalization(model, {})  # refuses what it cannot do before anything is read
        self._loss = resolve_loss(loss, store, store.task, outputs=network.outputs, dtype=network.dtype)
        self._targets = Targets(store.task, incomplete=store.num_incomplete > 0)
        self._rows_bytes = rows_nbytes(store, normalized, network.dtype.itemsize, on_device=False) if normalized else 0
        self._trims = _trims(model, sampling.fanouts, self._carried)
        self.loader = NeighborLoader(
            store,
            sampling.fanouts,
            sampling.batch_size,
            input_nodes="train",
            shuffle=True,
            seed=self._seed,
            memory=self.memory_bytes,
            _beside=self._model_bytes,
            _is_own=lambda number: number % sampling.accumulate % self.ranks.count == self.ranks.rank,
            _processes=self.ranks.local_count,
        )
        if normalized:
            scalings = load_rows(store, normalized, network.dtype, on_device=False).scalings
            self._normalization = GcnNormalization(model, scalings)
        device_bytes, host_bytes = divide_memory(self.memory_bytes - self.loader.retained_bytes - self._rows_bytes)
        limits = replace(resources.limits, device_bytes=device_bytes, host_bytes=host_bytes)
        own = {"savings": (Saving.ACTIVE_ROWS,), "scoring_only": True, "compute_dtype": "float32"}
        return make(replace(resources, limits=limits), **own)

    @property
    def _both_fit(self) -> bool:
        """Whether batches and scoring may be in memory at once."""
        plan = self._prepared.plan
        return self.loader.plan.nbytes + plan.device_peak_bytes + plan.host_peak_bytes <= self.memory_bytes

    # ---- the algorithm -----------------------------------------------------------------------------------------

    def _train(self, last: int, eval_every: int, patience: int, allow_nonfinite: bool) -> list[EpochRecord]:
        state = self._state
        records: list[EpochRecord] = []
        while state.epoch < last and not (patience and state.stale >= patience):
            if not self._both_fit:
                self._session.close()
            record = self._epoch(state.epoch)
            if not allow_nonfinite:
                state.check_loss(record.loss)
                state.check_weights()
            self._schedules.step()
            state.epoch += 1
            self._averaging.update(state.epoch)
            if eval_every and (state.epoch % eval_every == 0 or state.epoch == last):
                started = time.perf_counter()
                record = record.scored(self.evaluate(), eval_s=time.perf_counter() - started)
            self._conclude(records, record)
        return records

    def _epoch(self, epoch: int) -> EpochRecord:
        """A step for every group of batches, of which every process computes every so-manieth."""
        loader, ranks, group = self.loader, self.ranks, self.sampling.accumulate
        loader.epoch, before = epoch, loader.read_bytes
        rows, waited, total = self.store.split_sizes["train"], 0.0, 0.0
        self.optimizer.zero_grad()  # of an epoch that was interrupted
        started = time.perf_counter()
        task = reported(self._listener, f"epoch {epoch + 1}", len(loader), "batches")
        with (
            torch.random.fork_rng(devices=[]),
            closing(iter(loader)) as batches,
            self._offloaded() as saved,
            task as advance,
        ):
            for step in range(0, len(loader), group):
                last = min(step + group, len(loader))
                rows_of_step = min(group * loader.batch_size, rows - step * loader.batch_size)
                gradients = StepSum(self.model, ranks)
                for first in range(step, last, ranks.count):
                    number, together = first + ranks.rank, min(ranks.count, last - first)
                    loss = 0.0
                    with self._statistics.of_batch():
                        if number < last:
                            asked = time.perf_counter()
                            batch = next(batches)
                            waited += time.perf_counter() - asked
                            torch.manual_seed(key_of(self._seed, epoch, number, _DROPOUT)[0])
                            loss = self._accumulate(batch, rows_of_step)
                            del batch
                    for found in gradients.add(loss, together):
                        total += found
                    self._statistics.fold(together)
                    advance(first + together)
                gradients.finish()
                self._update()
                self.optimizer.zero_grad()
        saved_bytes = (0, 0) if saved is None else (saved.moved.read_bytes, saved.moved.write_bytes)
        own = torch.tensor([loader.read_bytes - before + saved_bytes[0], saved_bytes[1]])
        read, written = torch.stack([*ranks.gathered(own)]).sum(0).tolist()
        return EpochRecord(
            epoch=epoch + 1,
            loss=total / self._loss.divisor,
            train_acc=None,
            valid_acc=None,
            test_acc=None,
            time_s=time.perf_counter() - started,
            eval_s=0.0,
            ssd_read_bytes=read,
            ssd_write_bytes=written,
            host_peak_bytes=loader.plan.nbytes * ranks.local_count,
            device_peak_bytes=0,
            io_wait_s=waited,
        )

    def _accumulate(self, batch: "Data", rows_of_step: int) -> float:
        """Add a batch's gradients to those of its step, which is of so many rows. Returns the sum of its losses."""
        size = batch.batch_size
        with self._normalized(self.model, batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=self._is_rounded):
                outputs_rC = self._outputs(self.model, batch)[:size].to(self._dtype)
            labels_rL = batch.y[:size, None] if self.store.task is Task.CLASSES else batch.y[:size]
            labels = self._targets.of("train", labels_rL, torch.arange(size), outputs=outputs_rC)
            total, gradient_rC = self._loss.gradient(outputs_rC.detach(), labels)
            torch.autograd.backward(
                outputs_rC, gradient_rC * (self.store.split_sizes["train"] / (self._loss.divisor * rows_of_step))
            )
        return float(total)

    def _offloaded(self) -> AbstractContextManager[Offload | None]:
        """Where not all that a batch's layers save fits: what becomes of it."""
        if self._saving is None:
            return nullcontext()
        return Offload(self.model, self._saving, spill_dir=self._scratch, hardware=self._hardware)

    def _normalized(self, model: nn.Module, batch: "Data") -> AbstractContextManager[None]:
        """Layers take the degrees of the full graph: around both passes, since either may run them."""
        on_meta = batch.x.is_meta
        normalization = GcnNormalization(model, {}) if on_meta else self._normalization
        degrees = batch.row_id if on_meta else torch.from_numpy(self.loader.in_degrees(batch.row_id.numpy()))
        return normalization.applied(batch.row_id, degrees, batch.edge_index)

    def _outputs(self, model: nn.Module, batch: "Data") -> Tensor:
        """What the model gives for a batch's nodes; of those that lie further out, maybe less."""
        x = F.dropout(batch.x.to(self._dtype), self._input_dropout, training=True)
        given: dict[str, Any] = {}
        if EdgeData.WEIGHT in self._carried:
            given["edge_weight"] = batch.edge_weight.to(self._dtype)
        if EdgeData.FEATURES in self._carried:
            given["edge_attr"] = batch.edge_attr.to(self._dtype)
        if self._trims:
            given["num_sampled_nodes_per_hop"] = batch.num_sampled_nodes
            given["num_sampled_edges_per_hop"] = batch.num_sampled_edges
        outputs: Tensor = model(x, batch.edge_index, **given)
        return outputs

    def evaluate(self) -> Scores:
        """Score all splits of the full graph, with the model as it is, or the average of its weights. Of several
        processes the first does, and all have to ask."""
        scores: Scores = {}
        if self.ranks.rank:
            self.ranks.wait()
        else:
            with self.ranks.waited_for() as tell, self._relay.joined(tell):
                scores = self._evaluate()
        return self.ranks.told(lambda: scores)

    def _evaluate(self) -> Scores:
        if self._both_fit:
            return super().evaluate()
        self.loader.close()
        try:
            return super().evaluate()
        finally:
            self._session.close()

    def _start(self) -> None:
        if self.ranks.rank:  # the first scores
            self._snapshot.check()
        else:
            super()._start()

    # ---- memory, and the end -----------------------------------------------------------------------------------

    def _model_bytes(self, most: list[tuple[int, int]], left: int) -> int:
        """What training takes beside batches that have so many nodes and edges after each hop at most, where so many
        bytes are ``left`` for it: what the layers save is kept if it fits, and planned for otherwise."""
        from torch_geometric.data import Data

        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        kept = 4 * parameters + self._averaging.nbytes + self._rows_bytes  # gradients, and up to three of the optimizer
        kept += StepSum.nbytes(self.model, self.ranks)
        (nodes, edges), before = most[-1], [(0, 0), *most]
        sizes = [(now[0] - then[0], now[1] - then[1]) for now, then in zip(most, before, strict=False)]
        meta = torch.device("meta")
        carried = self.store.num_edge_features
        batch = Data(
            x=torch.empty(nodes, self.store.num_features, dtype=self._dtype, device=meta),
            edge_index=torch.empty(2, edges, dtype=torch.int64, device=meta),
            edge_weight=torch.empty(edges, dtype=self._dtype, device=meta),
            edge_attr=torch.empty(edges, carried, dtype=self._dtype, device=meta),
            row_id=torch.empty(nodes, dtype=torch.int64, device=meta),
            num_sampled_nodes=[count for count, _ in sizes],
            num_sampled_edges=[count for _, count in sizes][1:],
        )
        given = [value for value in batch.to_dict().values() if isinstance(value, Tensor)]

        def outputs(model: nn.Module) -> Tensor:
            return self._outputs(model, batch)[: most[0][0]]

        try:
            within = partial(self._normalized, batch=batch)
            runs = DryRuns(self.model, outputs, self._hardware, known=given, within=within)
            whole = int(runs.kept_bytes * (_AUTOCAST_SHARE if self._is_rounded else 1))
            # What autocast saves has other sizes than on the meta device: no plan can be made of it.
            if kept + whole <= left or self._is_rounded:
                return kept + whole
            try:
                self._saving = runs.plan(max(0, left - kept), 0)
            except BudgetError:
                return kept + runs.least_bytes
            self._listener(Note(_said(self._saving)))
            return kept + self._saving.nbytes
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            self._listener(Note(f"what the layers make of a batch is not counted in the memory: {reason}"))
            return kept

    def predict(self, *given: Any, **named: Any) -> Tensor | None:
        """As ``Trainer.predict``."""
        self.loader.close()
        return super().predict(*given, **named)

    def close(self) -> None:
        """Free everything but the model. ``fit`` may be called again."""
        self.loader.close()
        super().close()

    def _shown(self, last: int, eval_every: int) -> AbstractContextManager[None]:
        return nullcontext()  # what is shown goes by a forecast


def _said(plan: SavingPlan) -> str:
    """What becomes of what the layers of a batch save."""
    each = [f"{format_size(nbytes)} on {fate.value}" for fate, nbytes in plan.bytes_by_fate().items() if nbytes]
    recomputed = plan.fates.count(Fate.RECOMPUTE)
    each += [f"{recomputed} layers recomputed"] if recomputed else []
    return f"what the layers of a batch save does not fit: {', '.join(each)}"


def _trims(model: nn.Module, fanouts: Sequence[int], carried: frozenset[EdgeData]) -> bool:
    """Whether each layer may be left what later ones read, as PyG's ``trim_to_layer`` does for its own models."""
    plain = isinstance(model, BasicGNN) and getattr(model, "jk_mode", None) is None and len(carried) < len(EdgeData)
    return plain and len(fanouts) >= int(getattr(model, "num_layers", 0))
