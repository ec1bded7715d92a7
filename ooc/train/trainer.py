# SPDX-License-Identifier: Apache-2.0
"""The trainer: lower the model, plan, then epochs of forward, loss, backward, step.

Everything that needs memory is admitted first: what cannot be planned raises BudgetError before a byte is
allocated or written.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ooc.errors import OptionError
from ooc.events import EpochFinished, Listener, ignore
from ooc.interruption import interruptible_by_ctrl_c
from ooc.plan import Fate, Hardware, Limits, Plan, Workload
from ooc.prefetch.device import Device
from ooc.storage.store import Store
from ooc.train.averaging import Averaging
from ooc.train.evaluation import make_scorer
from ooc.train.loss import RowsLoss, resolve_loss
from ooc.train.metrics import resolve_metric
from ooc.train.objective import Objective, judging_nbytes
from ooc.train.placement import Placement
from ooc.train.prediction import Prediction
from ooc.train.record import EpochRecord
from ooc.train.run import RunFolder
from ooc.train.schedule import Scheduler, Schedules
from ooc.train.session import Session, Snapshot
from ooc.train.setup import (
    TILE_ROWS,
    Resources,
    Saving,
    check_optimizer,
    check_trainable,
    checked_norm,
    make_setup,
    take_apart,
    training_programs,
)
from ooc.train.stages import StageBuilder, Step
from ooc.train.standing import Standing
from ooc.train.unchanged import Unchanged
from ooc.train.workload import drop_gradients_cut_off, zero_gradients

__all__ = ["OVERHEAD_BYTES", "TILE_ROWS", "Saving", "Trainer"]

_TRITON_BYTES = 80_000_000 if find_spec("triton") else 0
"""torch-geometric imports a part of torch that imports triton where it is installed, GPU or not."""
OVERHEAD_BYTES = 500_000_000 + _TRITON_BYTES if torch.version.cuda is None else 800_000_000
"""Resident memory of the interpreter with torch, whose build for CUDA is larger and comes with triton, and
torch-geometric, besides the two budgets."""

Scores = dict[str, float | None]


class Trainer:
    """Trains ``model`` in place, exactly, on the whole graph in ``store``, within two memory budgets.

    ``gpu_budget`` bounds the device arena (on the CPU: slabs, blocks and temporaries of the computation),
    ``host_budget`` what is kept besides; both are sizes like ``"4G"`` or bytes. ``spill_dir`` takes scratch data
    (default: the system's temporary folder); ``out`` a run folder. ``block_rows`` and ``slab_columns`` override
    the planner; neither they nor the budgets change any result. ``max_ssd_writes`` bounds what a training epoch may
    write to the SSD (scoring comes on top). ``spill_dtype="bfloat16"`` keeps intermediates in
    half the bytes; sums are still taken in the model's own type, and results again do not depend on the budgets.
    ``compute_dtype="bfloat16"`` rounds the factors of dense products, as autocast does.

    Modules that are in eval mode, in a model that is in training mode when it is given here, train in eval mode (a
    frozen ``BatchNorm``); otherwise all of it trains as ``model.train()`` leaves it. Modes set later have no part.

    ``loss`` is a torch loss or a callable on (outputs [r, C], labels) that gives one loss a row, [r], or a scalar
    that is their mean; by default cross-entropy, for several labels a node BCE with logits, for values the mean
    squared error. ``metric`` is what evaluation measures (see ``Metric``; default by the store's task). ``scheduler``
    is one of torch's, or several, stepped once an epoch; ``clip_norm`` bounds the norm of all gradients;
    ``average``, an ``AveragedModel(model)``, takes the weights in from epoch ``average_from`` on and is what is
    scored. ``input_dropout`` drops features before the first layer. ``threads`` compute tiles side by side
    (default: torch's number). ``device`` is a name, or a ``Device`` that the caller has made. ``savings`` are on unless
    left out. Weights and features of the store's edges are given to the model as ``edge_weight`` and ``edge_attr``; one
    that takes none of them is refused, unless ``ignore_edge_data`` is ``"weight"``, ``"features"`` or ``"all"``.
    ``hardware`` is the machine as the planner is to see it (default: as ``ooc profile`` has measured it, if it has); it
    changes no result. What the model is made of and which of its parameters are trained is settled here: changed later,
    it is refused, but for values of weights and buffers.

    Raises ModelError for what cannot be run exactly, BudgetError with the least budgets that would do.
    A context manager; ``close`` frees arenas, threads and spill files.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        gpu_budget: str | int = "1G",
        host_budget: str | int = "4G",
        device: str | Device = "auto",
        seed: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        loss: RowsLoss | None = None,
        spill_dir: str | Path | None = None,
        out: str | Path | RunFolder | None = None,
        *,
        input_dropout: float = 0.0,
        metric: str | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
        average: AveragedModel | None = None,
        average_from: int = 1,
        listener: Listener = ignore,
        block_rows: int | None = None,
        slab_columns: int | None = None,
        max_ssd_writes: str | int | None = None,
        spill_dtype: str | None = None,
        compute_dtype: str = "float32",
        tile_rows: int | None = None,
        threads: int | None = None,
        savings: Collection[Saving] = tuple(Saving),
        ignore_edge_data: str = "none",
        hardware: Hardware | None = None,
    ) -> None:
        check_trainable(store)
        self._resources = Resources.parse(
            gpu_budget,
            host_budget,
            spill_dir=spill_dir,
            block_rows=block_rows,
            slab_columns=slab_columns,
            max_ssd_writes=max_ssd_writes,
            spill_dtype=spill_dtype,
            tile_rows=tile_rows,
            threads=threads,
            listener=listener,
            hardware=hardware,
            device=device,
        ).within_memory()
        self._resources = self._resources.for_model(model, store)
        place = self._resources.place
        task = store.task
        self.model, self.store = model, store
        self.metric = resolve_metric(metric, task, store.num_classes)
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
        check_optimizer(self.optimizer, model)
        self._clip_norm = checked_norm(clip_norm)
        self._schedules = Schedules(scheduler, self.optimizer, rising=self.metric.higher_is_better)
        self._averaging = Averaging(model, average, average_from)
        self._share_forward = Saving.SHARED_FORWARD in savings
        network, active = take_apart(
            model,
            store,
            input_dropout=input_dropout,
            tile_rows=self._resources.tile_rows,
            savings=savings,
            ignore_edge_data=ignore_edge_data,
            compute_dtype=compute_dtype,
        )
        self._objective = Objective(
            task,
            resolve_loss(loss, store, task, outputs=network.outputs, dtype=network.dtype, place=place),
            make_scorer(store, self.metric, rows=active.scoring[0], dtype=network.dtype),
            tile_rows=self._resources.tile_rows,
        )
        judging_host_bytes, judging_device_bytes = judging_nbytes(
            store,
            self.metric,
            network,
            rows=active.scoring[0],
            tile_rows=self._resources.tile_rows,
            on_device=self._resources.hardware.has_device_memory,
        )
        self._setup = make_setup(
            network,
            store,
            self._resources,
            active,
            self._objective,
            self._programs,
            seed=seed,
            extra_host_bytes=judging_host_bytes,
            extra_device_bytes=self._averaging.nbytes + judging_device_bytes,
        )
        if self._resources.device is not None:
            self._objective.count_members(store)
        models = [model] if average is None else [model, average]
        self._session = Session(self._setup, store, self._resources, Placement(place, models, self.optimizer))
        self._run = out if isinstance(out, RunFolder) or out is None else RunFolder.create(out, {"seed": seed})
        self._unchanged = Unchanged(model)
        self._standing = Standing(model, self.optimizer, self._schedules, self._averaging, self.metric, self._run, seed)

    def _programs(self, builder: StageBuilder) -> dict[str, list[Step]]:
        # Where weights are averaged, what is scored is not what is trained.
        return training_programs(builder, share_forward=self._share_forward and not self._averaging.active)

    @property
    def plan(self) -> Plan:
        """What will wait where, and what an epoch takes."""
        return self._setup.plan

    @property
    def workload(self) -> Workload:
        """What the plan is for."""
        return self._setup.workload

    @property
    def hardware(self) -> Hardware:
        """The machine as the plan sees it."""
        return self._resources.hardware

    @property
    def limits(self) -> Limits:
        """The budgets that the plan keeps to."""
        return self._resources.limits

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._standing.epoch

    @property
    def best(self) -> dict[str, Any] | None:
        """Epoch and scores of the best validation score so far."""
        return self._standing.best

    # ---- the algorithm ---------------------------------------------------------------------------------

    @interruptible_by_ctrl_c()
    def fit(
        self,
        epochs: int = 1,
        *,
        eval_every: int = 0,
        patience: int = 0,
        resume: bool = False,
        allow_nonfinite: bool = False,
    ) -> list[EpochRecord]:
        """Train for ``epochs`` more epochs (with ``resume``: up to that many in all, from the run's checkpoint).

        Every ``eval_every`` epochs (0: never) all splits are scored; after ``patience`` evaluations without a
        better validation score (0: never) training stops. Returns one record an epoch trained here.

        Where scoring and the next epoch share a forward pass, an epoch's scores come with the next epoch's loss
        and gradients, before these are stepped; where the scores end the training, the gradients are dropped.

        TrainingError where the loss or the weights are no finite numbers any more; the run keeps its last checkpoint.
        ``allow_nonfinite`` goes on.

        Ctrl-C ends it between two steps of a pass, after a second anywhere: KeyboardInterrupt. The epoch under way is
        lost, and the weights are those of the one before.
        """
        self._check_evaluated(eval_every, patience)
        self._unchanged.check()
        standing = self._standing
        last = standing.epoch + epochs
        if resume:
            standing.resume()
            last = epochs
        self._start()
        records: list[EpochRecord] = []
        unscored: EpochRecord | None = None
        while standing.epoch < last and not (patience and standing.stale >= patience):
            started = _Mark(self._session)
            loss = self._loss_and_gradients(scored=unscored is not None)
            if not allow_nonfinite:
                standing.check_loss(loss)
            if unscored is not None:
                self._conclude(records, unscored.scored(self._scores()))
                unscored = None
                if patience and standing.stale >= patience:
                    zero_gradients(self._setup.network)
                    break
            self._step()
            if not allow_nonfinite:
                standing.check_weights()
            standing.epoch += 1
            record = self._record(standing.epoch, loss, started)
            due = bool(eval_every) and (standing.epoch % eval_every == 0 or standing.epoch == last)
            if due and standing.epoch < last and "train_and_score" in self._setup.steps:
                unscored = record
            elif due:
                self._conclude(records, self._evaluated(record))
            else:
                self._conclude(records, record)
        return records

    def _loss_and_gradients(self, *, scored: bool) -> float:
        """Forward, loss, backward over the whole graph. Returns the mean loss; ``scored``: scores come with it."""
        self._setup.builder.epoch = self.epoch
        self._objective.begin()
        zero_gradients(self._setup.network)
        with self._setup.network.summing_gradients():
            self._session.run("train_and_score" if scored else "train", f"epoch {self.epoch + 1}")
        drop_gradients_cut_off(self._setup.network)
        return self._objective.mean_loss()

    def _step(self) -> None:
        """One optimizer step, and what follows it."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._setup.network.parameters, self._clip_norm)
        self.optimizer.step()
        self._schedules.step()
        self._averaging.update(self.epoch + 1)

    @interruptible_by_ctrl_c()
    def evaluate(self) -> Scores:
        """Score all splits with the model as it is: ``train_acc``, ``valid_acc``, ``test_acc`` (None: empty split).

        Where weights are averaged, these are scored.
        """
        self._unchanged.check()
        self._start()
        self._objective.begin()
        with self._averaging.in_place():
            self._session.run("evaluate", "evaluation")
        return self._scores()

    @interruptible_by_ctrl_c()
    def predict(
        self,
        what: str = "logits",
        *,
        layer: int | None = None,
        nodes: npt.ArrayLike | None = None,
        out: str | Path | None = None,
        force: bool = False,
    ) -> Tensor | None:
        """Logits, labels or embeddings with the model as it is (averaged weights, where there are such), exactly and
        within the same budgets, by the ids that nodes have in the source.

        ``layer`` counts hidden layers, for embeddings; ``nodes`` are the ids wanted, by default all of them, as
        ``store.ids`` has them. With ``out`` they go to that file, by its ending ``.npy``, ``.zarr``, ``.parquet`` or
        ``.csv`` (``force``: one that exists is replaced), otherwise they are returned, [n, columns] or [n].
        """
        self._session.close()  # its memory is needed
        with (
            self._averaging.in_place(),
            closing(Prediction(self.model, self.store, self._resources, what, layer=layer, nodes=nodes)) as found,
        ):
            if out is None:
                return found.read()
            found.write(out, force=force)
            return None

    def _scores(self) -> Scores:
        return {f"{split}_acc": score for split, score in self._objective.scores().items()}

    # ---- around it ---------------------------------------------------------------------------------------

    def _record(self, epoch: int, loss: float, started: "_Mark") -> EpochRecord:
        now = _Mark(self._session)
        return EpochRecord(
            epoch=epoch,
            loss=loss,
            train_acc=None,
            valid_acc=None,
            test_acc=None,
            time_s=now.time_s - started.time_s,
            eval_s=0.0,
            ssd_read_bytes=now.io.read_bytes - started.io.read_bytes,
            ssd_write_bytes=now.io.write_bytes - started.io.write_bytes,
            host_peak_bytes=self._session.peak_bytes(Fate.HOST),
            device_peak_bytes=self._session.peak_bytes(Fate.DEVICE),
            io_wait_s=now.io.wait_s - started.io.wait_s,
            io_busy_s=now.io.busy_s - started.io.busy_s,
            hit_rate=self.plan.hit_rate,
            to_device_bytes=now.io.to_device_bytes - started.io.to_device_bytes,
            to_host_bytes=now.io.to_host_bytes - started.io.to_host_bytes,
            passes=self._session.passes(),
            ssd_way=self._session.ssd_way(),
        )

    def _evaluated(self, record: EpochRecord) -> EpochRecord:
        """``record`` with the scores of an evaluation of its own."""
        started = _Mark(self._session)
        scores = self.evaluate()
        now = _Mark(self._session)
        return record.scored(scores, eval_s=now.time_s - started.time_s, wait_s=now.io.wait_s - started.io.wait_s)

    def _conclude(self, records: list[EpochRecord], record: EpochRecord) -> None:
        self._standing.conclude(record)
        records.append(record)
        self._resources.listener(EpochFinished(record))

    def _check_evaluated(self, eval_every: int, patience: int) -> None:
        if patience and not eval_every:
            raise OptionError("patience counts evaluations; give eval_every=1 as well")
        if self._schedules.needs_scores and not eval_every:
            raise OptionError("a plateau schedule goes by the validation score; give eval_every=1 as well")
        if self._schedules.needs_scores and not self.store.split_sizes["valid"]:
            raise OptionError(f"a plateau schedule goes by the validation score; {self.store.path} has no such split")

    def _start(self) -> None:
        if self._session.started:
            return
        self._session.check_disk()
        if self._run is not None:
            self._run.start()
        self._session.start()

    @interruptible_by_ctrl_c()
    def close(self) -> None:
        """Free arenas, threads and spill files. The model keeps its weights; ``fit`` may be called again."""
        self._session.close()
        if self._run is not None:
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Mark:
    """Time and I/O counters at one moment."""

    def __init__(self, session: Session) -> None:
        self.time_s = time.perf_counter()
        self.io: Snapshot = session.io()
