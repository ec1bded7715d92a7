# SPDX-License-Identifier: Apache-2.0
"""The trainer: lower the model, plan, then epochs of forward, loss, backward, step.

Everything that needs memory is admitted first: what cannot be planned raises BudgetError before a byte is
allocated or written.
"""

import ctypes
import time
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.errors import BudgetError, ModelError, OptionError, StoreError
from ooc.events import EpochFinished, Listener, Note, TaskAdvanced, TaskFinished, TaskStarted, ignore
from ooc.plan import Fate, Limits, Plan, make_plan
from ooc.plan.cost import recomputing_pays
from ooc.plan.verifier import verify_plan
from ooc.prefetch.spill import free_bytes
from ooc.sizes import format_size, parse_size
from ooc.storage.array import Array
from ooc.storage.store import Store
from ooc.train.evaluation import Evaluation
from ooc.train.executor import Executor
from ooc.train.first_aggregation import find_aggregation, keep_aggregation
from ooc.train.graph import ActiveRows, load_rows, rows_nbytes
from ooc.train.lowering import Network, lower
from ooc.train.record import EpochRecord
from ooc.train.run import RunFolder
from ooc.train.stages import LossFunction, StageBuilder, Step
from ooc.train.workload import STORE_MATRICES, describe_workload, matrix_columns, zero_gradients

OVERHEAD_BYTES = 500_000_000
"""Resident memory of the interpreter with torch and torch-geometric, besides the two budgets."""

TILE_ROWS = 1024
"""Rows computed at once. A tile of 128 float32 columns is 512 KiB, so that a stage's temporaries stay in the
core's cache; it is also the unit in which gradients are summed, which makes results independent of block rows."""


class Saving(Enum):
    """Work that may be left out without changing any result."""

    FIRST_AGGREGATION = "first aggregation once"
    """A(X) of constant features is computed once instead of in every epoch."""
    ACTIVE_ROWS = "active rows"
    """In a store in hop order, only rows that can reach a scored row are computed."""


class Trainer:
    """Trains ``model`` in place, exactly, on the whole graph in ``store``, within two memory budgets.

    ``gpu_budget`` bounds the device arena (on the CPU: slabs, blocks and temporaries of the computation),
    ``host_budget`` what is kept besides; both are sizes like ``"4G"`` or bytes. ``spill_dir`` takes scratch data
    (default: the system's temporary folder); ``out`` a run folder. ``loss`` is cross-entropy.
    ``input_dropout`` drops features before the first layer. ``block_rows`` and ``slab_columns`` override the
    planner; neither they nor the budgets change any result. ``metric``: ``"accuracy"`` or ``"roc-auc"``.
    ``threads`` compute tiles side by side (default: torch's number). ``savings`` are on unless left out.

    Raises ModelError for a model that cannot be run exactly, BudgetError with the least budgets that would do.
    A context manager; ``close`` frees arenas, threads and spill files.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        gpu_budget: str | int = "1G",
        host_budget: str | int = "4G",
        device: str = "auto",
        seed: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        loss: nn.Module | None = None,
        spill_dir: str | Path | None = None,
        out: str | Path | RunFolder | None = None,
        *,
        input_dropout: float = 0.0,
        metric: str = "accuracy",
        listener: Listener = ignore,
        block_rows: int | None = None,
        slab_columns: int | None = None,
        tile_rows: int = TILE_ROWS,
        threads: int | None = None,
        savings: Collection[Saving] = tuple(Saving),
    ) -> None:
        _check_device(device)
        _check_store(store, metric)
        self.model = model
        self.store = store
        self.seed = seed
        self.spill_dir = Path(spill_dir) if spill_dir is not None else Path(gettempdir())
        self.epoch = 0
        self.best: dict[str, Any] | None = None
        self._stale_evaluations = 0
        self._threads = _checked_positive(threads, "threads") or torch.get_num_threads()
        self._listener = listener
        self._executor: Executor | None = None
        self._prepared = False
        self._run = out if isinstance(out, RunFolder) or out is None else RunFolder.create(out, {"seed": seed})
        depth_rows = ActiveRows.of_store if Saving.ACTIVE_ROWS in savings else _all_rows
        self._network = lower(
            model,
            num_features=store.num_features,
            num_classes=store.num_classes,
            input_dropout=input_dropout,
            aggregate_once=Saving.FIRST_AGGREGATION in savings,
            active=lambda depth: depth_rows(store, depth),
            edges_per_row=store.num_edges / store.num_nodes,
        )
        active = depth_rows(store, self._network.depth)
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
        _check_optimizer(self.optimizer, model)
        limits = Limits(
            device_bytes=parse_size(gpu_budget, name="gpu budget"),
            host_bytes=parse_size(host_budget, name="host budget"),
            block_rows=_checked_multiple(block_rows, tile_rows),
            slab_columns=_checked_positive(slab_columns, "slab columns"),
        )
        self._arrays = {name: store.array(name) for name in STORE_MATRICES}
        kept = find_aggregation(store, self._network.scaling, self._network.dtype)
        if kept is not None and self._network.aggregates_once:
            self._arrays["ax"] = kept
        self._builder, self.plan = _plan(
            self._network,
            store,
            self._arrays,
            active,
            limits,
            tile_rows,
            _loss_function(loss),
            seed=seed,
            metric=metric,
            threads=self._threads,
        )
        self._train_steps = self._builder.train()
        self._evaluation = Evaluation(self._builder, store, metric)

    # ---- the algorithm ---------------------------------------------------------------------------------

    def fit(
        self, epochs: int = 1, *, eval_every: int = 0, patience: int = 0, resume: bool = False
    ) -> list[EpochRecord]:
        """Train for ``epochs`` more epochs (with ``resume``: up to that many in all, from the run's checkpoint).

        Every ``eval_every`` epochs (0: never) all splits are scored; after ``patience`` evaluations without a
        better validation score (0: never) training stops. Returns one record an epoch trained here.
        """
        if patience and not eval_every:
            raise OptionError("patience counts evaluations; give eval_every as well")
        last = self.epoch + epochs
        if resume:
            self._resume()
            last = epochs
        executor = self._start()
        records = []
        while self.epoch < last and not (patience and self._stale_evaluations >= patience):
            before = _Snapshot(executor)
            start = time.perf_counter()
            loss = self._train_epoch(executor)
            trained = time.perf_counter()
            due = eval_every and ((self.epoch + 1) % eval_every == 0 or self.epoch + 1 == last)
            trained_io = _Snapshot(executor)
            scores = self._evaluate(executor) if due else {"train_acc": None, "valid_acc": None, "test_acc": None}
            self.epoch += 1
            record = EpochRecord(
                epoch=self.epoch,
                loss=loss,
                **scores,
                time_s=trained - start,
                eval_s=time.perf_counter() - trained if due else 0.0,
                ssd_read_bytes=trained_io.read_bytes - before.read_bytes,
                ssd_write_bytes=trained_io.write_bytes - before.write_bytes,
                host_peak_bytes=executor.peak_bytes(Fate.HOST),
                device_peak_bytes=executor.peak_bytes(Fate.DEVICE),
                io_wait_s=_Snapshot(executor).wait_s - before.wait_s,
            )
            records.append(record)
            self._conclude(record)
        return records

    def _train_epoch(self, executor: Executor) -> float:
        """Forward, loss, backward over the whole graph, then one optimizer step. Returns the mean loss."""
        builder = self._builder
        builder.epoch, builder.loss_sum = self.epoch, 0.0
        zero_gradients(self._network)
        self._run_program(executor, "train", self._train_steps)
        self.optimizer.step()
        return builder.loss_sum / builder.train_rows

    def evaluate(self) -> dict[str, float | None]:
        """Score all splits with the model as it is: ``train_acc``, ``valid_acc``, ``test_acc`` (None: empty split)."""
        return self._evaluate(self._start())

    def _evaluate(self, executor: Executor) -> dict[str, float | None]:
        self._evaluation.begin()
        self._run_program(executor, "evaluate", self._evaluation.steps)
        return {f"{split}_acc": score for split, score in self._evaluation.scores().items()}

    # ---- around it ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free arenas, threads and spill files. The model keeps its weights; ``fit`` may be called again."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None
            self._prepared = False
        if self._run is not None:
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> Executor:
        """Arenas, files and the first aggregation, unless they are there already."""
        if self._executor is None:
            _check_disk(self.spill_dir, self.plan.spill_bytes)
            if self._run is not None:
                self._run.start()
            _keep_freed_memory()
            self._executor = Executor(
                self.plan,
                self.store,
                self._arrays,
                self._builder.rows,
                self._network.dtype,
                self.spill_dir,
                threads=self._threads,
            )
        if not self._prepared:
            self._prepare(self._executor)
            self._prepared = True
        return self._executor

    def _prepare(self, executor: Executor) -> None:
        """Compute the first aggregation, and keep it in the store for later runs."""
        steps = self._builder.prepare()
        if not steps:
            return
        self._run_program(executor, "prepare", steps)
        if keep_aggregation(self.store, self._network.scaling, executor, "ax"):
            self._listener(Note(f"the first aggregation is kept in {self.store.path} for later runs"))

    @torch.no_grad()
    def _run_program(self, executor: Executor, program: str, steps: list[Step]) -> None:
        if not steps:
            return
        task = {"prepare": "first aggregation", "train": f"epoch {self.epoch + 1}", "evaluate": "evaluation"}[program]
        self._listener(TaskStarted(task, len(self.plan.programs[program]), "passes"))
        intra_op_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            executor.run(program, steps, self._builder.commit, lambda done: self._listener(TaskAdvanced(task, done)))
        finally:
            torch.set_num_threads(intra_op_threads)
            self._listener(TaskFinished(task))

    def _conclude(self, record: EpochRecord) -> None:
        """Keep the best weights, write checkpoint and metrics, tell the listener."""
        if record.valid_acc is not None:
            if self.best is None or record.valid_acc > self.best["valid_acc"]:
                self.best = {"epoch": record.epoch, "valid_acc": record.valid_acc, "test_acc": record.test_acc}
                self._stale_evaluations = 0
                if self._run is not None:
                    self._run.save_best({**self.best, "model": self.model.state_dict(), "record": record.as_dict()})
            else:
                self._stale_evaluations += 1
        if self._run is not None:
            self._run.save(
                {
                    "epoch": self.epoch,
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "record": record.as_dict(),
                    "best": self.best,
                    "stale_epochs": self._stale_evaluations,
                    "seed": self.seed,
                }
            )
            self._run.append(record)
        self._listener(EpochFinished(record))

    def _resume(self) -> None:
        state = self._run.load() if self._run is not None else None
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        self.best = state["best"]
        self._stale_evaluations = state["stale_epochs"]


class _Snapshot:
    """The engine's counters at one moment."""

    def __init__(self, executor: Executor) -> None:
        counters = executor.counters
        self.read_bytes = counters.read_bytes
        self.write_bytes = counters.write_bytes
        self.wait_s = counters.wait_s


def _plan(
    network: Network,
    store: Store,
    arrays: dict[str, Array],
    active: ActiveRows,
    limits: Limits,
    tile_rows: int,
    loss: LossFunction,
    *,
    seed: int,
    metric: str,
    threads: int,
) -> tuple[StageBuilder, Plan]:
    """Admit the per-row facts, read them, and plan the rest around them."""
    fixed = rows_nbytes(store, network.scaling, network.dtype.itemsize) + Evaluation.nbytes(store, metric)
    if fixed > limits.host_bytes:
        raise BudgetError(
            f"row offsets and scalings of {store.num_nodes:,} nodes need {format_size(fixed)} on the host, the host "
            f"budget is {format_size(limits.host_bytes)}; give --host-budget {-(-fixed // 1000)}K"
        )
    rows = load_rows(store, network.scaling, network.dtype)

    def attempt(recompute: bool) -> tuple[StageBuilder, Plan]:
        builder = StageBuilder(
            network,
            rows,
            undirected=store.undirected,
            loss=loss,
            train_rows=store.split_sizes["train"],
            num_columns=matrix_columns(network, store),
            aggregated="ax" in arrays,
            recompute=recompute,
            active=active,
            seed=seed,
        )
        workload = describe_workload(
            network, builder, store, arrays, rows, tile_rows=tile_rows, fixed_host_bytes=fixed, threads=threads
        )
        return builder, make_plan(workload, limits)

    builder, plan = attempt(False)
    if plan.ssd_write_bytes and network.aggregates_once and network.depth > 1:
        again = attempt(True)
        saved = plan.ssd_bytes - again[1].ssd_bytes
        if recomputing_pays(multiplies=again[0].recomputed_multiplies(), saved_ssd_bytes=saved):
            builder, plan = again
    verify_plan(plan)
    return builder, plan


def _loss_function(loss: nn.Module | None) -> LossFunction:
    """Cross-entropy summed over rows; other losses are refused by name."""
    if loss is None:
        smoothing = 0.0
    elif type(loss) is nn.CrossEntropyLoss:
        if loss.weight is not None:
            raise ModelError("CrossEntropyLoss with class weights is not supported")
        if loss.reduction != "mean":
            raise ModelError(f"CrossEntropyLoss with reduction={loss.reduction!r} is not supported; use 'mean'")
        smoothing = loss.label_smoothing
    else:
        raise ModelError(f"loss {type(loss).__name__} is not supported; use CrossEntropyLoss")

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)

    return summed


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("optimizer LBFGS evaluates the loss several times a step, which is not supported")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ModelError(f"optimizer {type(optimizer).__name__} holds parameters that are not the model's")


def _all_rows(store: Store, depth: int) -> ActiveRows:
    return ActiveRows.everything(store.num_nodes, depth)


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise OptionError(f"device {device!r} is not one of auto, cpu, cuda")
    if device == "cuda":
        reason = "is not supported yet" if torch.cuda.is_available() else "is not available on this machine"
        raise OptionError(f"device cuda {reason}; use --device cpu")


def _check_store(store: Store, metric: str) -> None:
    if not store.split_sizes["train"]:
        raise StoreError(f"{store.path} has no training nodes; convert it with a split")
    if metric not in ("accuracy", "roc-auc"):
        raise OptionError(f"metric {metric!r} is not one of accuracy, roc-auc")
    if metric == "roc-auc" and store.num_classes != 2:
        raise OptionError(f"metric roc-auc is for two classes, the store has {store.num_classes}")


def _check_disk(folder: Path, nbytes: int) -> None:
    if not folder.is_dir():
        raise OptionError(f"spill folder {folder} does not exist")
    free = free_bytes(folder)
    if nbytes > free:
        raise BudgetError(
            f"the plan spills {format_size(nbytes)} to {folder}, where {format_size(free)} are free; "
            "give another --spill-dir or larger budgets"
        )


def _checked_multiple(block_rows: int | None, tile_rows: int) -> int | None:
    if tile_rows < 1:
        raise OptionError(f"tile rows must be positive, not {tile_rows}")
    if block_rows is not None and (block_rows < 1 or block_rows % tile_rows):
        raise OptionError(f"block rows must be a multiple of {tile_rows}, not {block_rows}")
    return block_rows


def _checked_positive(count: int | None, name: str) -> int | None:
    if count is not None and count < 1:
        raise OptionError(f"{name} must be positive, not {count}")
    return count


def _keep_freed_memory() -> None:
    """Let glibc keep what tiles' temporaries free: handing it back and faulting it in again for every tile costs
    more than the arithmetic (first touch of 4 KiB pages runs at 0.4 GB/s). Bounded by the tiles' size."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 64 << 20)
