# SPDX-License-Identifier: Apache-2.0
"""Training by sampled mini-batches: a step for every batch, or for several, and scores of the full graph.

Batches come from ``ooc.sampling``; the module runs on them as it is. What is scored is the full graph, exactly, by the
programs that full-graph training scores with. All is admitted first: the batches and what the layers make of the
largest of them, parameters, what the optimizer keeps, and the plan of scoring.
"""

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.engine.record import EpochRecord
from ooc.engine.session import Session
from ooc.errors import ModelError, OptionError, RunError
from ooc.events import EpochFinished, Listener, Note, ignore, reported
from ooc.interruption import interruptible_by_ctrl_c
from ooc.memory import divide_memory
from ooc.model.graph import load_rows, rows_nbytes
from ooc.model.task import Targets
from ooc.plan.workload import EdgeData
from ooc.sampling.loader import NeighborLoader
from ooc.sampling.normalization import GcnNormalization
from ooc.sampling.sampler import key_of
from ooc.sampling.step_memory import step_bytes
from ooc.storage.store import Store, Task, open_store
from ooc.train.averaging import Averaging
from ooc.train.loss import RowsLoss, resolve_loss
from ooc.train.metrics import resolve_metric
from ooc.train.model_snapshot import ModelSnapshot
from ooc.train.resources import Resources, spill_folder
from ooc.train.run import RunFolder
from ooc.train.schedule import Scheduler, Schedules
from ooc.train.setup import Saving, check_optimizer, edge_data_used, prepare
from ooc.train.state import TrainingState

if TYPE_CHECKING:
    from torch_geometric.data import Data

_DROPOUT = 2**33
"""Beside seed, epoch and batch in the key of what the layers draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How batches are made: the most neighbours that are drawn of a node, by hop (-1: all), the nodes of a batch, and
    the batches of a step."""

    fanouts: Sequence[int]
    batch_size: int
    accumulate: int = 1


class SampledTrainer:
    """Trains ``model`` in place by batches that are sampled from ``graph``, within the memory it is given.

    Arguments as of ``Trainer``. The loss of an epoch is the mean over its training rows, each as its batch's step found
    it. Of several batches a step, gradients are those of one batch of all their rows. A context manager.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Store | str | Path,
        sampling: Sampling,
        *,
        memory: str | int | None = None,
        seed: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        loss: RowsLoss | None = None,
        spill_dir: str | Path | None = None,
        out: RunFolder | None = None,
        input_dropout: float = 0.0,
        metric: str | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
        average: AveragedModel | None = None,
        average_from: int = 1,
        listener: Listener = ignore,
        threads: int | None = None,
        ignore_edge_data: str = "none",
    ) -> None:
        self.model, self.sampling = model, sampling
        self.store = store = graph if isinstance(graph, Store) else open_store(graph)
        self.spill_dir = spill_folder(spill_dir, None if out is None else out.path, store)
        resources = Resources.parse(memory=memory, spill_dir=self.spill_dir, threads=threads, listener=listener)
        self._resources = resources = resources.within_memory()
        self.limits = resources.limits
        self.metric = resolve_metric(metric, store.task, store.num_classes)
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
        check_optimizer(self.optimizer, model)
        self._seed, self._input_dropout, self._clip_norm = seed, input_dropout, clip_norm
        self._schedules = Schedules(scheduler, self.optimizer, rising=self.metric.higher_is_better)
        self._averaging = Averaging(model, average, average_from)
        self._carried = edge_data_used(store, ignore_edge_data)
        scored = partial(
            prepare,
            model,
            store,
            metric=self.metric,
            loss=loss,
            averaging=self._averaging,
            ignore_edge_data=ignore_edge_data,
            savings=(Saving.ACTIVE_ROWS,),
            optimizer_options=self.optimizer.param_groups,
            scoring_only=True,
        )
        network = scored(resources).network
        if any(scaling.reversed for scaling in network.scalings):
            raise ModelError("sums against the edges need out-edges, and a batch has in-edges of its nodes only")
        self._dtype = network.dtype
        self._loss = resolve_loss(loss, store, store.task, outputs=network.outputs, dtype=network.dtype)
        normalized = [scaling for scaling in network.scalings if scaling.normalized]
        self._rows_bytes = rows_nbytes(store, normalized, network.dtype.itemsize, on_device=False) if normalized else 0
        self._trims = _trims(model, sampling.fanouts, self._carried)
        GcnNormalization(model, {})  # refuses what it cannot do before anything is read
        self.loader = NeighborLoader(
            store,
            sampling.fanouts,
            sampling.batch_size,
            input_nodes="train",
            shuffle=True,
            seed=seed,
            memory=self.limits.memory_bytes,
            _beside=self._model_bytes,
        )
        scalings = load_rows(store, normalized, network.dtype, on_device=False).scalings if normalized else {}
        self._normalization = GcnNormalization(model, scalings)
        device_bytes, host_bytes = divide_memory(
            self.limits.memory_bytes - self.loader.retained_bytes - self._rows_bytes
        )
        left = replace(resources, limits=replace(self.limits, device_bytes=device_bytes, host_bytes=host_bytes))
        job = scored(left)
        self._objective, prepared = job.objective, job.ready()
        planned = prepared.plan.device_peak_bytes + prepared.plan.host_peak_bytes
        self._both_fit = self.loader.plan.nbytes + planned <= self.limits.memory_bytes
        self._scoring = Session(prepared, [model] if average is None else [model, average], self.optimizer)
        self._targets = Targets(store.task, incomplete=store.num_incomplete > 0)
        self._run = out
        if out is not None:
            facts = {"scored_by": self.metric.value, "model_class": type(model).__name__, "graph": store.name}
            out.config |= facts
        self._snapshot = ModelSnapshot(model)
        self._state = TrainingState(model, self.optimizer, self._schedules, self._averaging, self.metric, out, seed)
        self._end = weakref.finalize(self, _close, self.loader, self._scoring, out)
        self._end.atexit = False

    # ---- the algorithm -----------------------------------------------------------------------------------------

    @interruptible_by_ctrl_c()
    def fit(
        self,
        epochs: int = 1,
        *,
        eval_every: int = 1,
        patience: int = 0,
        resume: bool = False,
        allow_nonfinite: bool = False,
    ) -> list[EpochRecord]:
        """As ``Trainer.fit``; an epoch that is interrupted is lost, and its steps with it when the run goes on."""
        if not eval_every and (patience or self._schedules.needs_scores):
            raise OptionError("patience and a plateau schedule go by the validation score; give eval_every=1 as well")
        state = self._state
        if resume:
            state.resume()
        elif self._run is not None and self._run.resumed and not state.epoch:
            raise RunError(f"{self._run.path} holds a run already; give resume=True to go on with it")
        last = epochs if resume else state.epoch + epochs
        self._snapshot.check()
        self._scoring.check_disk()
        if self._run is not None:
            self._run.start()
        records = []
        while state.epoch < last and not (patience and state.stale >= patience):
            record = self._epoch(check=not allow_nonfinite)
            if eval_every and (record.epoch % eval_every == 0 or record.epoch == last):
                record = self._evaluated(record)
            state.conclude(record)
            records.append(record)
            self._resources.listener(EpochFinished(record))
        return records

    def _epoch(self, *, check: bool) -> EpochRecord:
        """A step for every group of batches."""
        state, loader, group = self._state, self.loader, self.sampling.accumulate
        loader.epoch = state.epoch
        before, started, waited, total = _Counted(loader), time.perf_counter(), 0.0, 0.0
        rows = self.store.split_sizes["train"]
        a_step = group * loader.batch_size
        asked = started
        self.optimizer.zero_grad()  # of an epoch that was interrupted
        batches = iter(loader)
        task = reported(self._resources.listener, f"epoch {state.epoch + 1}", len(loader), "batches")
        with torch.random.fork_rng(devices=[]), task as advance:
            for number, batch in enumerate(batches):
                waited += time.perf_counter() - asked
                rows_of_step = min(a_step, rows - number // group * a_step)
                torch.manual_seed(key_of(self._seed, state.epoch, number, _DROPOUT)[0])
                total += self._accumulate(batch, rows_of_step)
                del batch
                if (number + 1) % group == 0 or number + 1 == len(loader):
                    self._step()
                advance(number + 1)
                asked = time.perf_counter()
        loss = total / self._loss.divisor
        if check:
            state.check_loss(loss)
            state.check_weights()
        self._schedules.step()
        state.epoch += 1
        self._averaging.update(state.epoch)
        return before.record(loader, epoch=state.epoch, loss=loss, time_s=time.perf_counter() - started, wait_s=waited)

    def _accumulate(self, batch: "Data", rows_of_step: int) -> float:
        """Add a batch's gradients to those of its step, which is of so many rows. Returns the sum of its losses."""
        size = batch.batch_size
        outputs_rC = self._outputs(self.model, batch)[:size]
        labels_rL = batch.y[:size, None] if self.store.task is Task.CLASSES else batch.y[:size]
        labels = self._targets.of("train", labels_rL, torch.arange(size), outputs=outputs_rC)
        total, gradient_rC = self._loss.gradient(outputs_rC.detach(), labels)
        torch.autograd.backward(
            outputs_rC, gradient_rC * (self.store.split_sizes["train"] / (self._loss.divisor * rows_of_step))
        )
        return float(total)

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
        on_meta = batch.x.is_meta
        normalization = GcnNormalization(model, {}) if on_meta else self._normalization
        degrees = batch.row_id if on_meta else torch.from_numpy(self.loader.in_degrees(batch.row_id.numpy()))
        with normalization.applied(batch.row_id, degrees, batch.edge_index):
            outputs: Tensor = model(x, batch.edge_index, **given)
        return outputs

    def _step(self) -> None:
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> dict[str, float | None]:
        """Score all splits on the full graph, with the model as it is, or the average of its weights."""
        if not self._both_fit:
            self.loader.close()
        self._scoring.start()
        try:
            self._objective.begin()
            with self._averaging.in_place():
                self._scoring.run("train", "evaluation")
        finally:
            if not self._both_fit:
                self._scoring.close()
        return {f"{split}_acc": score for split, score in self._objective.scores().items()}

    def _evaluated(self, record: EpochRecord) -> EpochRecord:
        started = time.perf_counter()
        return record.scored(self.evaluate(), eval_s=time.perf_counter() - started)

    # ---- memory, and the end -----------------------------------------------------------------------------------

    def _model_bytes(self, most: list[tuple[int, int]]) -> int:
        """What training takes beside batches that have so many nodes and edges after each hop at most."""
        from torch_geometric.data import Data

        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        kept = 4 * parameters + self._averaging.nbytes + self._rows_bytes  # gradients, and up to three of the optimizer
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
        try:
            return kept + step_bytes(self.model, lambda model: self._outputs(model, batch)[: most[0][0]])
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            self._resources.listener(Note(f"what the layers make of a batch is not counted in the memory: {reason}"))
            return kept

    def close(self) -> None:
        """Free everything but the model. ``fit`` may be called again."""
        _close(self.loader, self._scoring, self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Counted:
    """What a loader had read before an epoch."""

    def __init__(self, loader: NeighborLoader) -> None:
        self._before = loader.read_bytes

    def record(self, loader: NeighborLoader, *, epoch: int, loss: float, time_s: float, wait_s: float) -> EpochRecord:
        """Of the epoch since then, which waited so long for batches; not scored yet."""
        return EpochRecord(
            epoch=epoch,
            loss=loss,
            train_acc=None,
            valid_acc=None,
            test_acc=None,
            time_s=time_s,
            eval_s=0.0,
            ssd_read_bytes=loader.read_bytes - self._before,
            ssd_write_bytes=0,
            host_peak_bytes=loader.plan.nbytes,
            device_peak_bytes=0,
            io_wait_s=wait_s,
        )


def _trims(model: nn.Module, fanouts: Sequence[int], carried: frozenset[EdgeData]) -> bool:
    """Whether each layer may be left what later ones read, as PyG's ``trim_to_layer`` does for its own models."""
    plain = isinstance(model, BasicGNN) and getattr(model, "jk_mode", None) is None and len(carried) < len(EdgeData)
    return plain and len(fanouts) >= int(getattr(model, "num_layers", 0))


def _close(loader: NeighborLoader, scoring: Session, run: RunFolder | None) -> None:
    loader.close()
    scoring.close()
    if run is not None:
        run.close()
