# SPDX-License-Identifier: Apache-2.0
"""Training by mini-batches of any kind: a step for every batch, or for several, by one process or by several.

All memory is admitted first: batches and what the layers make of the largest of them, parameters, the optimizer's
state. Where what a batch's layers save for the backward pass does not fit, a plan is made for it.

Sampled batches come from ``ooc.sampling``; the module runs on them as it is. Scores are of the full graph, exactly, by
the program that full-graph training scores with, whose plan is admitted, too.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.engine.record import EpochRecord
from ooc.errors import BudgetError, ModelError, OptionError
from ooc.events import Note, reported
from ooc.kernels.dropout.edges import key_of
from ooc.memory import divide_memory
from ooc.model.graph import load_rows, rows_nbytes
from ooc.model.layers.layer import in_modes
from ooc.model.lowering.assembly import Results
from ooc.model.lowering.network import dtype_of, values_of
from ooc.model.lowering.tracing import arranged, edge_arguments, takes_data
from ooc.model.lowering.trimming import Trimmed
from ooc.model.lowering.values import Aggregate
from ooc.model.lowering.whole import call_model
from ooc.model.task import Targets
from ooc.offloading.measure import META, DryRuns, SavingPlan, Step
from ooc.offloading.offload import Offload
from ooc.plan.workload import EdgeData, Fate
from ooc.progress.live import Tier
from ooc.ranks import RunningStatistics, StepSum
from ooc.sampling.graphs import GraphLoader
from ooc.sampling.loader import NeighborLoader
from ooc.sampling.normalization import GcnNormalization
from ooc.sampling.runs import Ints
from ooc.sizes import check_whole, format_size
from ooc.storage.array import read_rows
from ooc.storage.store import Store, Task
from ooc.train.job import Job
from ooc.train.loss import BY_LABELS, BY_ROWS, Loss, of_results, resolve_loss, takes_results
from ooc.train.metrics import Scores
from ooc.train.resources import Resources
from ooc.train.setup import Saving, lower_model, prepare, setting_of
from ooc.train.trainer import Trainer

if TYPE_CHECKING:
    from torch_geometric.data import Data


_DROPOUT = 2**33
"""The purpose, in a key with seed, epoch and batch, of the layers' random numbers."""
_FULL_GRAPH = {
    "device": ("auto", "cpu"),
    "spill_dtype": (None, "float32", "float64"),
    "embedding": (None,),
    "optimizer_state": ("auto", "memory"),
}
_AUTOCAST_SHARE = 1.5
"""The most memory of a step with autocast, relative to one without, since rounded copies come on top; for five models
of two to five layers it was 0.8 to 1.13."""


class BatchTrainer(Trainer):
    """Trains by the batches of a loader. The loss of an epoch is the mean over its training rows, each in its batch's
    step.

    The gradients of several batches in a step are those of one batch of all their rows.

    With several processes started by ``torchrun``, each computes a share of every step's batches, and all make the same
    steps; their number changes no result. ``memory`` is that of all processes of a machine. The first one scores, and
    writes the run.
    """

    loader: NeighborLoader | GraphLoader
    """The loader of an epoch's batches that are this process's."""
    _loss: Loss
    _scored_columns: int
    """The columns of the outputs."""
    _dtype: torch.dtype
    _batches_bytes: int
    """The bytes that the loader and the model take together."""
    batch_model: nn.Module
    """The model, or a wrapper that calls it for batches."""
    memory_bytes: int
    """The memory of this process."""
    _is_bounded = False
    """Whether a model is refused if the memory of its batches cannot be counted."""

    def __init__(self, model: nn.Module, graph: Any, *, accumulate: int, **options: Any) -> None:
        for name, values in _FULL_GRAPH.items():
            if str(options.get(name, values[0])) not in map(str, values):  # torch.device("cpu") is "cpu"
                raise OptionError(f"{name}={options[name]!r} is of full-graph training, not of batches")
        check_whole(accumulate, name="accumulate")
        self._a_step, self._is_rounded = accumulate, options.get("compute_dtype") == "bfloat16"
        self._saving: SavingPlan | None = None
        self.batch_model = getattr(model, "_orig_mod", model)
        super().__init__(model, graph, **options)

    def _extra_arguments(self) -> dict[str, Any]:
        # Torch's products round differently by number of threads.
        return {"accumulate": self._a_step, "threads": torch.get_num_threads()}

    def _loader_options(self, model: nn.Module, resources: Resources, seed: int) -> dict[str, Any]:
        """Return the loader's options common to all kinds of batches.

        OptionError where a step has no batch for some process.
        """
        if self.ranks.count > self._a_step:
            raise OptionError(
                f"a step of {self._a_step} batches has none for some of {self.ranks.count} processes; give "
                f"accumulate={self.ranks.count} or more (the batches of a step, of all processes together)"
            )
        self._statistics = RunningStatistics(model, self.ranks)
        self._seed, self._listener = seed, resources.listener
        self.hardware, self.spill_dir = resources.hardware, resources.spill_dir
        self.memory_bytes = resources.limits.memory_bytes // self.ranks.local_count
        self._targets = Targets(self.store)
        if not model.training:
            model.train()
        self._modes = {module: module.training for module in model.modules()}
        return {
            "shuffle": True,
            "seed": seed,
            "memory": self.memory_bytes,
            "_beside": self._model_bytes,
            "_is_own": self._is_own,
            "_listener": resources.listener,
            "_processes": self.ranks.local_count,
        }

    def _is_own(self, number: int) -> bool:
        """Return whether this process computes the batch of that number."""
        return number % self._a_step % self.ranks.count == self.ranks.rank

    # ---- the algorithm -----------------------------------------------------------------------------------------

    def _train(self, last: int, eval_every: int, patience: int, allow_nonfinite: bool) -> list[EpochRecord]:
        state = self._state
        records: list[EpochRecord] = []
        self._conclude_interrupted(records, eval_every)
        while state.epoch < last and not (patience and state.stale >= patience):
            self._free_scoring_memory()
            record = self._epoch(state.epoch)
            if not allow_nonfinite:
                state.check_loss(record.loss)
                state.check_weights()
            self._schedules.step()
            state.epoch += 1
            self._averaging.update(state.epoch)
            self._unfinished_epoch = record
            due = bool(eval_every) and (state.epoch % eval_every == 0 or state.epoch == last)
            self._conclude(records, self._evaluated(record) if due else record, eval_every)
        return records

    def _evaluated(self, record: EpochRecord) -> EpochRecord:
        started = time.perf_counter()
        return record.scored(self._evaluate(), eval_s=time.perf_counter() - started)

    def _epoch(self, epoch: int) -> EpochRecord:
        """Make a step for every group of batches, which the processes compute in turn."""
        loader, ranks, group = self.loader, self.ranks, self._a_step
        loader.epoch, before = epoch, loader.read_bytes
        count, waited, total = len(loader), 0.0, 0.0
        self.model.zero_grad()  # left by an interrupted epoch, or of parameters without steps
        started = time.perf_counter()
        task = reported(self._listener, f"epoch {epoch + 1}", count, "batches")
        with (
            in_modes(self._modes),
            torch.random.fork_rng(devices=[]),
            closing(iter(loader)) as batches,
            self._offloaded() as saved,
            task as advance,
        ):
            for step in range(0, count, group):
                last = min(step + group, count)
                scale = self._scale(epoch, step, last)
                gradients = StepSum(self.model, ranks)
                for first in range(step, last, ranks.count):
                    number, together = first + ranks.rank, min(ranks.count, last - first)
                    loss = 0.0
                    with self._statistics.of_batch():
                        if number < last:
                            asked = time.perf_counter()
                            batch = next(batches)
                            waited += time.perf_counter() - asked
                            # torch.manual_seed takes 8 ms: it records the stack for absent devices.
                            torch.default_generator.manual_seed(key_of(self._seed, epoch, number, _DROPOUT)[0])
                            try:
                                loss = self._accumulate(batch, scale)
                            except ValueError as error:  # raised by torch, for instance by a batch norm on one row
                                raise ModelError(f"batch {number + 1} of epoch {epoch + 1}: {error}") from error
                            del batch
                    for found in gradients.add(loss, together):
                        total += found
                    self._statistics.fold(together)
                    advance(first + together)
                gradients.finish()
                self._update()
                self.model.zero_grad()
        saved_bytes = (0, 0) if saved is None else (saved.moved.read_bytes, saved.moved.write_bytes)
        own = torch.tensor([loader.read_bytes - before + saved_bytes[0], saved_bytes[1]])
        read, written = torch.stack([*ranks.gathered(own)]).sum(0).tolist()
        return EpochRecord(
            epoch=epoch + 1,
            loss=total / self._loss.divisor,
            time_s=time.perf_counter() - started,
            ssd_read_bytes=read,
            ssd_write_bytes=written,
            host_peak_bytes=self._batches_bytes * ranks.local_count,
            device_peak_bytes=0,
            io_wait_s=waited,
        )

    def _free_scoring_memory(self) -> None:
        """Free what only scoring needed, if an epoch needs its memory."""

    def _scale(self, epoch: int, first: int, last: int) -> float:
        """Return the factor that makes a step's loss the mean over its rows, or over its known labels, as in torch."""
        weight = self._loss.weight
        if weight is None:
            return 1.0
        batches, y = self._rows_of_step(epoch, first, last), self.store.array("y")
        if weight in (BY_ROWS, BY_LABELS):
            return 1.0 / weight(torch.empty(sum(map(len, batches)), y.columns, device=META))
        total = sum(weight(self._labels("train", torch.from_numpy(read_rows(y, rows)))) for rows in batches)
        return 1.0 / total if total else 0.0

    @abstractmethod
    def _rows_of_step(self, epoch: int, first: int, last: int) -> list[Ints]:
        """Return the rows that these batches train."""

    def _labels(self, split: str, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the labels of a split for ``rows`` of ``y`` [r] or [r, L] (None: all)."""
        if self.store.task is Task.MULTILABEL and y.is_floating_point():
            y = y.nan_to_num(nan=-1)
        rows = torch.arange(len(y)) if rows is None else rows
        outputs = torch.empty(0, self._scored_columns, dtype=self._dtype)
        return self._targets.of(split, y[:, None] if y.dim() == 1 else y, rows, outputs=outputs)

    @abstractmethod
    def _accumulate(self, batch: "Data", scale: float) -> float:
        """Add a batch's gradients, multiplied by ``scale``, to those of its step; return the sum of its losses."""

    def _backward(self, outputs_rC: Tensor, labels: Tensor, scale: float) -> float:
        """Propagate the loss of outputs back to gradients; return the sum of the losses. Tensors that the loss saves
        stay."""
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            total, gradient_rC = self._loss.gradient(outputs_rC.detach(), labels)
        torch.autograd.backward(outputs_rC, gradient_rC * scale)
        return float(total)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._is_rounded)

    def _offloaded(self) -> AbstractContextManager[Offload | None]:
        """Return the block that stores what a batch's layers save, where that does not fit."""
        if self._saving is None:
            return nullcontext()
        return Offload(self.batch_model, self._saving, spill_dir=self.spill_dir, hardware=self.hardware)

    def _evaluate(self) -> Scores:
        """Return the first process's scores; all processes have to call."""
        return self.ranks.from_first(self._evaluate_alone)

    @abstractmethod
    def _evaluate_alone(self) -> Scores: ...

    @abstractmethod
    def _model_bytes(self, most: Any, left: int) -> int:
        """Return the bytes that training takes beside batches of at most that size, of which so many bytes are
        ``left``.

        What the layers save is kept if it fits, and planned for otherwise.
        """

    # ---- memory, and the end -----------------------------------------------------------------------------------

    def _kept_bytes(self) -> int:
        """Return the bytes of gradients, up to three optimizer numbers for each, averages, and sums of several
        processes."""
        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        return 4 * parameters + self._averaging.nbytes + StepSum.nbytes(self.model, self.ranks)

    def _step_bytes(
        self,
        step: Step,
        given: list[Tensor],
        left: int,
        within: Callable[[nn.Module], AbstractContextManager[None]] = lambda module: nullcontext(),
    ) -> int:
        """Return the bytes that a ``step`` on the meta device with these inputs takes, of which so many bytes are
        ``left``.

        What the layers save is kept if it fits, and planned for otherwise.
        """
        try:
            runs = DryRuns(self.batch_model, step, self.hardware, known=given, within=within)
            whole = int(runs.kept_bytes * (_AUTOCAST_SHARE if self._is_rounded else 1))
            # What autocast and torch's loops over sequences (Set2Set, JumpingKnowledge("lstm")) save has other sizes
            # than on the meta device, and so do oneDNN's LSTMs: no plan can be made of it.
            is_recurrent = any(isinstance(part, nn.RNNBase) for part in self.batch_model.modules())
            if whole <= left or self._is_rounded or is_recurrent:
                return whole
            try:
                self._saving = plan = runs.plan(max(0, left), 0)
            except BudgetError:
                return runs.least_bytes
            kept = plan.bytes_by_fate().items()
            each = [f"{format_size(nbytes)} on {fate.value}" for fate, nbytes in kept if nbytes]
            recomputed = plan.fates.count(Fate.RECOMPUTE)
            each += [f"{recomputed} layers recomputed"] if recomputed else []
            self._listener(Note(f"what the layers of a batch save does not fit: {', '.join(each)}"))
            return plan.nbytes
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            what = f"what {type(self.model).__name__} makes of a batch cannot be counted beforehand ({reason})"
            if self._is_bounded:
                raise ModelError(f"{what}, so no memory can be promised: leave memory= out") from error
            self._listener(Note(f"{what}: memory is not bounded"))
            return 0

    def _free_memory(self) -> None:
        self.loader.close()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        count = self.ranks.local_count
        return (Tier("memory", count * self.memory_bytes, count * self._batches_bytes, ("host_peak_bytes",)),)

    def _displayed(self, last: int, eval_every: int) -> AbstractContextManager[None]:
        return nullcontext() if self.ranks.rank else super()._displayed(last, eval_every)

    def report(self, eval_every: int) -> None:
        return None


# ---- sampled batches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How batches are made: the most neighbours sampled of a node, by hop (-1: all), nodes per batch, and batches per
    step."""

    fanouts: Sequence[int]
    batch_size: int
    accumulate: int = 1


class SampledTrainer(BatchTrainer):
    """Trains ``model`` in place by batches that are sampled from ``graph``, within the memory it is given.

    Arguments as in ``Trainer``; ``compute_dtype="bfloat16"`` computes batches with torch's autocast. Where an epoch is
    interrupted, the steps it has made remain, except in a run that is resumed.
    """

    loader: NeighborLoader

    def __init__(
        self, model: nn.Module, graph: "Store | str | Path | Data", sampling: Sampling, **options: Any
    ) -> None:
        self.sampling = sampling
        super().__init__(model, graph, accumulate=sampling.accumulate, **options)

    def _extra_arguments(self) -> dict[str, Any]:
        return super()._extra_arguments() | {"sampling": self.sampling}

    def _job(self, resources: Resources) -> Job:
        """Return the job of scoring, planned within the memory that batches leave when they are over."""
        model, store, sampling = self.model, self.store, self.sampling
        left_out, loss = self._asked["ignore_edge_data"], self._asked["loss"]
        self._input_dropout = self._asked["input_dropout"]
        results = Results.ALL if takes_results(loss) else Results.FIRST
        options: dict[str, Any] = {"ignore_edge_data": left_out, "results": results, "in_batches": True}
        self._setting = setting = setting_of(store, dtype_of(model), **options)
        self._carried, self._as_data = setting.edge_data, takes_data(model)
        self._names = edge_arguments(model, self._carried, setting.weights_name)
        self._inputs, self._by_name = setting.inputs, tuple[str, ...]()
        if not self._as_data:
            self._inputs, self._by_name = arranged(model, self._inputs, self._names.values())
        _, network, _ = lower_model(model, store, resources, setting, savings=())
        if any(isinstance(value, Aggregate) and value.scaling.basic.reversed for value in values_of(network.training)):
            raise ModelError("sums against the edges need out-edges, and a batch has in-edges of its nodes only")
        normalized, self._dtype = [scaling for scaling in network.scalings if scaling.basic.normalized], network.dtype
        # Refuses unsupported models before anything is read.
        self._normalization = GcnNormalization(model, dict.fromkeys(normalized))
        self._scored_columns, self._takes_results = network.outputs, bool(network.result_columns)
        columns = network.result_columns or (network.training.columns,)
        shapes = {"flat_outputs": network.flat_result, "flat_labels": self._asked["flat_labels"]}
        self._loss = resolve_loss(loss, store, columns=columns, dtype=network.dtype, **shapes)
        self._rows_bytes = rows_nbytes(store, normalized, network.dtype.itemsize, on_device=False) if normalized else 0
        loading = self._loader_options(model, resources, self._asked["seed"])
        self._trims_layers = False
        if (trimmed := Trimmed.of(model, network)) is not None:
            self.batch_model = trimmed
        else:
            self._trims_layers = _trims_layers(model, sampling.fanouts, self._carried)
        drawn = store, sampling.fanouts, sampling.batch_size
        self.loader = NeighborLoader(*drawn, input_nodes="train", **loading)
        self._batches_bytes = self.loader.plan.nbytes
        if normalized:
            scalings = load_rows(store, normalized, network.dtype, on_device=False).scalings
            self._normalization = GcnNormalization(model, scalings)
        beside, processes = self.loader.retained_bytes + self._rows_bytes, self.ranks.local_count
        device_bytes, host_bytes = divide_memory(self.memory_bytes - beside)
        taken: dict[str, Any] = {"device_bytes": device_bytes, "host_bytes": host_bytes, "beside_bytes": beside}
        limits = replace(resources.limits, **taken, processes=processes)
        own = {"savings": (Saving.ACTIVE_ROWS,), "scoring_only": True, "compute_dtype": "float32"}
        return prepare(model, store, replace(resources, limits=limits), **self._asked | own)

    @property
    def _both_fit_in_memory(self) -> bool:
        """Return whether batches and scoring may be in memory at once."""
        plan = self._prepared.plan
        return self.loader.plan.nbytes + plan.device_peak_bytes + plan.host_peak_bytes <= self.memory_bytes

    def _free_scoring_memory(self) -> None:
        if not self._both_fit_in_memory:
            self._session.close()

    def _rows_of_step(self, epoch: int, first: int, last: int) -> list[Ints]:
        return [self.loader.seed_rows[seeds] for seeds in self.loader.seeds_of(epoch)[first:last]]

    def _accumulate(self, batch: "Data", scale: float) -> float:
        size = batch.batch_size
        with self._normalized(self.model, batch):
            with self._autocast():
                outputs_rC = self._outputs(self.batch_model, batch)[:size].to(self._dtype)
            labels = self._labels("train", batch.y[:size])
            return self._backward(outputs_rC, labels, scale)

    def _normalized(self, model: nn.Module, batch: "Data") -> AbstractContextManager[None]:
        """Make layers take the degrees of the full graph, around both passes, since either may run the layers."""
        on_meta = batch.x.is_meta
        normalization = GcnNormalization(model, self._normalization.scalings) if on_meta else self._normalization
        degrees = batch.row_id if on_meta else torch.from_numpy(self.loader.in_degrees(batch.row_id.numpy()))
        return normalization.applied(batch.row_id, degrees, batch.edge_index, batch.edge_weight)

    def _outputs(self, model: nn.Module, batch: "Data") -> Tensor:
        """Return the model's outputs for a batch's seeds, which may be followed by those of other nodes."""
        x = F.dropout(batch.x.to(self._dtype), self._input_dropout, training=True)
        given: dict[str, Any] = {}
        if EdgeData.WEIGHT in self._carried:
            given[self._names[EdgeData.WEIGHT]] = batch.edge_weight.to(self._dtype)
        if EdgeData.FEATURES in self._carried:
            given[self._names[EdgeData.FEATURES]] = batch.edge_attr.to(self._dtype)
        if isinstance(model, Trimmed):
            carried = [given.get(self._names.get(data, "")) for data in (EdgeData.WEIGHT, EdgeData.FEATURES)]
            sampled = batch.num_sampled_nodes, batch.num_sampled_edges
            return of_results(model(x, batch.edge_index, *carried, *sampled), every=False)
        if self._trims_layers:
            given["num_sampled_nodes_per_hop"] = batch.num_sampled_nodes
            given["num_sampled_edges_per_hop"] = batch.num_sampled_edges
        data = self._setting.left_out if self._as_data else None
        how: dict[str, Any] = {"inputs": self._inputs, "by_name": self._by_name, "data": data}
        return of_results(call_model(model, x, batch.edge_index, given, **how), every=self._takes_results)

    def _evaluate_alone(self) -> Scores:
        if self._both_fit_in_memory:
            return Trainer._evaluate(self)
        self.loader.close()
        try:
            return Trainer._evaluate(self)
        finally:
            self._session.close()

    def _start(self) -> None:
        if self.ranks.rank:  # only the first process scores
            self._snapshot.check()
        else:
            super()._start()

    # ---- memory, and the end -----------------------------------------------------------------------------------

    def _model_bytes(self, most: list[tuple[int, int]], left: int) -> int:
        """Return the model's bytes for batches with at most so many nodes and edges after each hop."""
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

    def _free_memory(self) -> None:
        super()._free_memory()
        self._session.close()


def _trims_layers(model: nn.Module, fanouts: Sequence[int], carried: frozenset[EdgeData]) -> bool:
    """Return whether the model is PyG's own and can leave out rows that later layers do not read (``trim_to_layer``).

    Norms over nodes then compute their statistics over the remaining rows.
    """
    plain = isinstance(model, BasicGNN) and getattr(model, "jk_mode", None) is None and len(carried) < len(EdgeData)
    return plain and len(fanouts) >= int(getattr(model, "num_layers", 0))
