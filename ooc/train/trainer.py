# SPDX-License-Identifier: Apache-2.0
"""The trainer: epochs of forward, loss, backward and step over the whole graph, however little of it is in memory.

The model is lowered, its programs are planned (``ooc.train.setup``), and a session runs them. All memory is admitted
first: where no plan fits, BudgetError is raised before anything is allocated or written.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ooc.engine.record import EpochRecord
from ooc.engine.recording import EpochRecorder
from ooc.engine.session import Prepared, Session
from ooc.engine.workers import one_thread
from ooc.errors import BudgetError, OocError, OptionError, RunError, TrainingError
from ooc.events import EpochFinished, Listener, Note, Relay, caution, ignore
from ooc.interruption import interruptible_by_ctrl_c
from ooc.model.lowering.network import dtype_of
from ooc.plan import Hardware
from ooc.prefetch.device import Device
from ooc.progress.live import Tier, TrainingView
from ooc.progress.plan_report import PlanReport
from ooc.progress.reporter import displayed
from ooc.ranks import ALONE, Ranks
from ooc.sizes import check_number, check_whole
from ooc.stages.workload import drop_gradients_cut_off, zero_gradients
from ooc.storage.store import Store, Task, open_store
from ooc.suggestions import checked
from ooc.train.embedding import Embedding, LearntRows
from ooc.train.job import Job
from ooc.train.loss import RowsLoss, takes_results, task_meant
from ooc.train.metrics import Metric, Scores, named_scores, resolve_metric
from ooc.train.model_snapshot import DataSnapshot, LossSnapshot, ModelSnapshot, check_software, described
from ooc.train.optimizer_state import StateOnDisk, check_there
from ooc.train.prediction import Prediction, Predictions
from ooc.train.resources import Resources, spill_folder
from ooc.train.runs.run import EMBEDDING, OPTIMIZER, TIMELINE, RunFolder, holds_run
from ooc.train.runs.state import TrainingState
from ooc.train.schedule import Averaging, Scheduler, Schedules
from ooc.train.setup import Saving, Tuning, check_model, check_optimizer, prepare, setting_of, size_lazy_parameters
from ooc.train.sharing import SharedJob

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["Saving", "Trainer", "Tuning"]

_CONVERTED_NAME = "graph.ooc"
"""The name of the store that a trainer makes of PyG's data."""
_FEW_PARAMETERS = 1 << 20
"""The number of parameters below which an optimizer step runs on one thread. A step of Adam then takes 5 ms, and
further threads would stay awake as long."""


class Trainer:
    """Trains ``model`` in place, exactly, on the whole graph in ``graph``, within the memory it is given.

    A context manager; ``close`` frees arenas, threads and spill files.

    With several processes started by ``torchrun``, each computes a share of the rows, and all make the same steps:
    their number changes no result. ``memory`` and ``host_budget`` are then those of all processes of a machine, which
    share them equally. The first one writes the run.
    """

    _prepared: Prepared
    _session: Session
    _state: TrainingState
    _stepped: Sequence[nn.Parameter]
    """The trained parameters."""
    _scorer: Any
    """A ``Scorer`` for nodes or graphs, a ``LinkScorer`` for links."""
    _kept: StateOnDisk | None = None
    """The optimizer's state, if it may be on the SSD."""
    _unfinished_epoch: EpochRecord | None = None
    """The record of an epoch whose step is made, and which is not scored and saved yet."""
    _works = _may_score = False
    """Whether the trainer is at work, and whether it may be asked for scores meanwhile."""
    _is_traced = True
    """Whether the model is traced. Otherwise it runs as it is, and what its functions refer to may change."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.model).__name__} on {self.store!r}: {self.epoch} epochs done>"

    @checked
    @interruptible_by_ctrl_c()
    def fit(
        self,
        epochs: int = 1,
        *,
        eval_every: int = 1,
        patience: int = 0,
        resume: bool = False,
        allow_nonfinite: bool = False,
        progress: bool = True,
    ) -> list[EpochRecord]:
        """Train for ``epochs`` more epochs (with ``resume``: up to that many in all, from the run's checkpoint).

        Every ``eval_every`` epochs (0: never) all splits are scored; after ``patience`` evaluations without a better
        validation score (0: never) training stops. Returns one record for each epoch trained here, and for one whose
        step was made when an earlier call was interrupted.

        Where scoring and the next epoch share a forward pass, an epoch's scores come with the next epoch's loss and
        gradients, before the next step; where the scores end the training, these gradients are dropped.

        ``progress`` shows it: live on a terminal and in a notebook, elsewhere as a line per epoch on standard error.

        TrainingError when the loss or the weights become infinite or NaN; the run keeps its last checkpoint. With
        ``allow_nonfinite`` training continues.

        Ctrl-C raises KeyboardInterrupt between two steps of a pass, after a second anywhere. The current epoch is lost,
        and the weights are those of the one before.
        """
        asked: dict[str, Any] = {"epochs": epochs, "eval_every": eval_every, "patience": patience}
        for name, given in asked.items():
            check_whole(given, name=name, least=0)
        with self._at_work():
            self._check_evaluated(eval_every, patience)
            asked |= {"resume": resume, "allow_nonfinite": allow_nonfinite}
            self.ranks.check_equal(asked, "what fit is to do")
            last = self._last_epoch(epochs, resume=resume)
            self._start()
            with self._displayed(last, eval_every) if progress else nullcontext():
                return self._train(last, eval_every, patience, allow_nonfinite)

    def _train(self, last: int, eval_every: int, patience: int, allow_nonfinite: bool) -> list[EpochRecord]:
        """Train epochs until ``last`` is done; the algorithm."""
        state = self._state
        records: list[EpochRecord] = []
        unscored: EpochRecord | None = None
        self._conclude_interrupted(records, eval_every)
        while state.epoch < last and not (patience and state.stale >= patience):
            started = self._session.runtime.taken()
            recorder = self._recorder(len(records), scored=unscored is not None)
            loss = self._loss_and_gradients(scored=unscored is not None, recorder=recorder)
            if unscored is not None:
                weights = self._weights_fingerprint()
                self._conclude(records, unscored.scored(self._scores()), eval_every)
                unscored = None
                if self._weights_fingerprint() != weights:
                    raise TrainingError(
                        "a listener has changed weights of which the next epoch's gradients had been computed; change "
                        "them between two calls of fit"
                    )
                if patience and state.stale >= patience:
                    zero_gradients(self._prepared.network)
                    break
                if self._learnt is not None and self._learnt.rate(self.optimizer) != self._learnt.stepping.lr:
                    loss = self._loss_and_gradients(scored=False)  # an embedding's rows take the current learning rate
            if not allow_nonfinite:
                state.check_loss(loss)
            self._step()
            if not allow_nonfinite:
                state.check_weights(self._prepared.network.parameters)
            self._commit_rows()
            state.epoch += 1
            self._unfinished_epoch = record = self._session.record(started, epoch=state.epoch, loss=loss)
            if recorder is not None and self._run is not None:
                self._run.write(TIMELINE, recorder.as_dict(state.epoch))
            due = bool(eval_every) and (state.epoch % eval_every == 0 or state.epoch == last)
            if due and state.epoch < last and "train_and_score" in self._prepared.steps:
                unscored = record
            else:
                self._conclude(records, self._evaluated(record) if due else record, eval_every)
            if state.epoch < last:
                self._rebalance(record, len(records) + (unscored is not None))
        return records

    def _rebalance(self, record: EpochRecord, trained: int) -> None:
        """Plan anew where some processes compute much longer than others, or all much longer than forecast.

        This happens after the first, second, fourth, eighth, … epoch trained here; no result depends on it.
        """
        exchange = self._prepared.exchange
        if exchange is None or trained & (trained - 1):
            return
        assert isinstance(self._planned, SharedJob), "there are several processes"
        program = record.passes[0].program
        # Some processes have fewer threads than planned.
        a_thread = self._planned.resources.threads / self._planned.resources.own_threads
        of_threads_s = sum(item.compute_s for item in record.passes) * a_thread
        taken_s = exchange.of_all(of_threads_s if self._prepared.device is None else exchange.device_s(program))
        if not self._planned.rebalance(program, taken_s):
            return
        self._session.close()
        self._prepared = prepared = self._planned.ready()
        self._session.adopt(prepared)
        self.workload, self.plan = prepared.workload, prepared.plan
        assert prepared.exchange is not None, "there are as many processes as before"
        shares = ", ".join(f"{100 * share:.0f} %" for share in prepared.exchange.parts)
        self._resources.listener(Note(f"planned anew, by how long processes have computed; rows: {shares}"))
        self._start()

    def _loss_and_gradients(self, *, scored: bool, recorder: EpochRecorder | None = None) -> float:
        """Run forward, loss and backward over the whole graph and return the mean loss; ``scored``: with scores.

        A trained embedding's rows are stepped meanwhile, to be committed with the parameters' step.
        """
        self._discard_pending_rows()
        self._prepared.builder.epoch = self._steps_made
        if self._learnt is not None:
            self._learnt.begin(lr=self._learnt.rate(self.optimizer), number=self._steps_made + 1)
        self._objective.begin()
        zero_gradients(self._prepared.network)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:  # or an optimizer would use an earlier training's gradient
                parameter.grad = None
        with self._prepared.network.summing_gradients():
            program = "train_and_score" if scored else "train"
            self._session.run(program, f"epoch {self.epoch + 1}", recorder)
        drop_gradients_cut_off(self._prepared.network)
        return self._objective.mean_loss()

    def _discard_pending_rows(self) -> None:
        """Discard an embedding's rows that an epoch has computed without a following step."""
        if self._learnt is not None and self._learnt.pending:
            self._session.forget()
            self._learnt.pending = False

    def _commit_rows(self) -> None:
        """Make an embedding's rows that an epoch has computed the current ones."""
        if self._learnt is not None:
            self._session.await_learnt()
            self._learnt.commit()

    def _step(self) -> None:
        """Make one optimizer step, and update schedules and averages."""
        self._update()
        self._schedules.step()
        self._averaging.update(self.epoch + 1)

    def _update(self) -> None:
        stepped = self._stepped
        if self._learnt is not None and self._clip_norm is not None:
            factor = self._learnt.stepping.scale(self._prepared.network)
            for gradient in (p.grad for p in stepped if p.grad is not None):
                gradient.mul_(factor)
        elif self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(stepped, self._clip_norm)
        if self._kept is None or not self._planned.has_state_on_disk:
            with one_thread() if sum(map(Tensor.numel, stepped)) < _FEW_PARAMETERS else nullcontext():
                self.optimizer.step()
        else:
            self._kept.step(self._session.runtime.engine)

    @checked
    @interruptible_by_ctrl_c()
    def evaluate(self) -> Scores:
        """Return the scores of all splits with the current model, by the trainer's metric.

        The keys are ``train_score``, ``valid_score`` and ``test_score``, with None for an empty split. Where weights
        are averaged, the average is scored.
        """
        with self._at_work(scoring=True):
            return self._evaluate()

    def _evaluate(self) -> Scores:
        self._start()
        self._discard_pending_rows()
        self._objective.begin()
        with self._averaging.in_place():
            self._session.run("evaluate", "evaluation")
        return self._scores()

    def _scores(self) -> Scores:
        return named_scores(self._objective.scores(self._prepared.exchange))

    @checked
    @interruptible_by_ctrl_c()
    def predict(
        self,
        what: str = "logits",
        *,
        layer: int | None = None,
        nodes: npt.ArrayLike | None = None,
        node_type: str | None = None,
        out: str | Path | None = None,
        force: bool = False,
    ) -> Tensor | None:
        """Return logits, labels or embeddings of the current model, or of averaged weights, exactly and within the same
        budgets.

        ``layer`` counts hidden layers, for embeddings; ``nodes`` are the wanted ids of the source, by default all of
        them, in the order of ``store.ids``; ``node_type``: in a heterogeneous graph, the type whose embedding (layer 0)
        is wanted. With ``out`` they are written to that file, by its suffix ``.npy``, ``.zarr``, ``.parquet`` or
        ``.csv`` (``force``: an existing one is replaced); otherwise they are returned, [n, columns] or [n].
        """
        options: dict[str, Any] = {"layer": layer, "nodes": nodes, "node_type": node_type, "learnt": self._learnt}
        options["ignore_edge_data"] = self._asked["ignore_edge_data"]
        made = partial(Prediction, self.model, self.store, self._resources, what, **options)
        return self._predicted(made, out, force=force)

    def _predicted(
        self, made: Callable[[], Predictions], out: str | Path | None = None, *, force: bool = False
    ) -> Tensor | None:
        """Return the predictions of the current model, or of averaged weights, in the memory that epochs otherwise
        take."""
        with self._at_work():
            self._check_converted()
            self._free_memory()
            self._start_embedding()
            with self._averaging.in_place(), closing(made()) as found:
                return found.result(out, force=force)

    # ---- what the loop needs -------------------------------------------------------------------------------

    @contextmanager
    def _at_work(self, *, scoring: bool = False) -> Iterator[None]:
        """Mark the trainer as at work within this context.

        TrainingError where it is already, in another thread or in a call from a listener, except for ``scoring`` when
        an epoch is over.
        """
        _check_autocast()
        if not self._lock.acquire(blocking=False):
            raise TrainingError("the trainer is at work in another thread; it does one thing at a time")
        before = self._works, self._may_score
        try:
            if self._works and not (scoring and self._may_score):
                when = "when an epoch is over, and for all else after that"
                raise TrainingError(f"the trainer is at work; ask it for evaluate() {when}")
            self._works, self._may_score = True, False
            yield
        finally:
            self._works, self._may_score = before
            self._lock.release()

    def _weights_fingerprint(self) -> list[tuple[int, str]]:
        """Return values that change if the weights are changed, in place or through ``.data``."""
        return [(one._version, str(float(one.detach().sum()))) for one in self._prepared.network.parameters]

    def _check_converted(self) -> None:
        if self._converted is not None and not Path(self._converted.name).exists():
            raise TrainingError("the trainer is closed, and its graph with it; make another one of the Data")
        for given in self._given:
            given.check()

    @property
    def epoch(self) -> int:
        """The number of epochs done."""
        return self._state.epoch

    @property
    def _steps_made(self) -> int:
        """The number of steps done, which is part of the key of dropout masks."""
        return self.epoch

    @property
    def _steps_unsaved(self) -> bool:
        """Whether steps are made after others that no checkpoint contains yet."""
        return "train_and_score" in self._prepared.steps

    @property
    def best(self) -> dict[str, Any] | None:
        """The epoch and the scores of the best validation score so far."""
        return self._state.best

    def _recorder(self, trained: int, *, scored: bool) -> EpochRecorder | None:
        """Return the recorder, for the run's folder, of the epoch after ``trained`` ones, or None.

        The second epoch is recorded, since the first one fills the memory; so is the first, in case it is the only one.
        """
        if self._run is None or trained > 1 or (trained == 0 and (self._run.path / TIMELINE).exists()):
            return None
        return EpochRecorder("train_and_score" if scored else "train")

    def _evaluated(self, record: EpochRecord) -> EpochRecord:
        """Return ``record`` with the scores of a separate evaluation."""
        started = self._session.runtime.taken()
        scores = self._evaluate()
        taken = self._session.runtime.taken().since(started)
        return record.scored(scores, eval_s=taken.time_s, wait_s=taken.io_wait_s)

    def _conclude_interrupted(self, records: list[EpochRecord], eval_every: int) -> None:
        """Conclude the epoch that an interrupted call of fit left unfinished; score it if it is due."""
        if (record := self._unfinished_epoch) is not None:
            due = bool(eval_every) and record.epoch % eval_every == 0
            self._conclude(records, self._evaluated(record) if due else record, eval_every)

    def _conclude(self, records: list[EpochRecord], record: EpochRecord, eval_every: int) -> None:
        self._unfinished_epoch = None
        self._state.conclude(record, in_turn=bool(eval_every) and record.epoch % eval_every == 0)
        records.append(record)
        self._may_score = True
        try:
            self._resources.listener(EpochFinished(record))
        finally:
            self._may_score = False

    def _displayed(self, last: int, eval_every: int) -> AbstractContextManager[None]:
        """Return a context that shows the training up to epoch ``last`` to a Python caller."""

        title = f"{type(self.model).__name__} on {self.store.path.name}"
        return displayed(self._relay, lambda: self.view(title, self.epoch + 1, last, eval_every), last)

    def view(
        self, title: str, first: int, last: int, eval_every: int, records: Sequence[EpochRecord] = ()
    ) -> TrainingView:
        """Return the view of the training of epochs ``first`` to ``last``, with ``records`` of earlier ones."""
        shown = title, first, last, self.metric.value, self.metric.higher_is_better, self.report(eval_every)
        return TrainingView(*shown, tiers=self.tiers, records=[*records])

    def report(self, eval_every: int) -> PlanReport | None:
        """Return the plan's promise for an epoch if every ``eval_every``-th is scored; None: it was not planned."""
        return PlanReport.of_run(self.workload, self.plan, self.hardware, self.limits, eval_every=eval_every)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The memories in use with their limits, where no plan gives them."""
        return ()

    def _last_epoch(self, epochs: int, *, resume: bool) -> int:
        """Return the number of the last epoch to train, from the current state or the run's checkpoint."""
        if resume:
            self._state.resume()
            self._unfinished_epoch = None
            return epochs
        if self._run is not None and self._run.resumed and not self.epoch:
            raise RunError(f"{self._run.path} holds a run already; give resume=True to go on with it")
        return self.epoch + epochs

    def _check_evaluated(self, eval_every: int, patience: int) -> None:
        if not (patience or self._schedules.needs_scores):
            return
        why = "patience counts evaluations" if patience else "a plateau schedule goes by the validation score"
        if not eval_every:
            raise OptionError(f"{why}; give eval_every=1 as well")
        if reason := self._why_unscored():
            raise OptionError(f"{why}, and {reason}")

    def _why_unscored(self) -> str:
        """Return why there will be no validation scores; an empty string if there will."""
        if not self.store.split_sizes["valid"]:
            return f"{self.store.path} has no validation split"
        return "there are no scores of these outputs" if self._scorer.metric is None else ""

    def _start(self) -> None:
        self._snapshot.check()
        self._check_converted()
        check_there(self.optimizer, self._kept)
        if self._session.started:
            return
        beside = 0 if self._learnt is None else self._learnt.room_beside(self.spill_dir, self._steps_unsaved)
        self._session.check_disk(beside)
        if self._run is not None:
            self._run.start()
        self._start_embedding()
        self._session.start()
        if self._kept is not None and self._planned.has_state_on_disk:
            self._kept.open(self.spill_dir, self._session.runtime.engine)

    def _start_embedding(self) -> None:
        """Open the embedding's rows; refuse to initialise them where a run exists that is not being resumed."""
        if self._learnt is not None:
            if self._run is not None:
                if self._run.has_checkpoint and not self.epoch:
                    raise RunError(f"{self._run.path} holds a run already; give fit(resume=True) first")
                self._run.start()
            self._learnt.open(self.spill_dir, steps_unsaved=self._steps_unsaved)

    # ---- setting up and closing ----------------------------------------------------------------------------

    @checked
    def __init__(
        self,
        model: nn.Module,
        graph: "Store | str | Path | Data",
        gpu_budget: str | float | None = None,
        host_budget: str | float | None = None,
        device: str | torch.device | Device = "auto",
        seed: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        loss: RowsLoss | None = None,
        spill_dir: str | Path | None = None,
        out: str | Path | RunFolder | None = None,
        *,
        memory: str | float | None = None,
        input_dropout: float = 0.0,
        metric: str | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
        average: AveragedModel | None = None,
        average_from: int = 1,
        embedding: Embedding | Mapping[str, int] | int | None = None,
        listener: Listener = ignore,
        block_rows: int | None = None,
        slab_columns: int | None = None,
        exchange: str = "auto",
        exchange_by: str = "auto",
        link: str | int | None = None,
        max_ssd_writes: str | int | None = None,
        optimizer_state: str = "auto",
        spill_dtype: str | None = None,
        compute_dtype: str = "float32",
        threads: int | None = None,
        ignore_edge_data: str = "none",
        hardware: Hardware | None = None,
        _tuning: Tuning = Tuning(),  # noqa: B008  # frozen
    ) -> None:
        """Plan the training of ``model`` on ``graph``; memory and files are allocated by the first call that runs.

        ``graph`` is an open store, its path, or PyG's ``Data`` or ``HeteroData``. The latter are converted, beside the
        scratch data, into a store that ``close`` removes.

        ``memory`` bounds what the CPU works in, a size like ``"4G"`` or bytes, by default three quarters of what is
        free. For a GPU, ``gpu_budget`` bounds its memory and ``host_budget`` the host's, by default nine tenths and
        half of what is free (on the CPU they are two parts of ``memory``). ``spill_dir`` takes scratch data (default:
        the disk of ``out``, else of the store); ``out`` is the folder of a run, new or to be resumed. ``block_rows``
        and ``slab_columns`` override the planner. So does ``exchange``, which says what several processes send each
        other for a pull: the ``"halo"`` of rows, or some ``"columns"`` of all rows where these can be sharded. By
        default it is the faster one when each process receives ``link`` bytes a second (default: measured first). Rows
        go from GPU to GPU by the faster way, unless ``exchange_by`` says ``"host"`` or ``"device"``. None of these, nor
        the budgets, changes any result. ``max_ssd_writes`` bounds what a training epoch may write to the SSD (scoring
        comes on top). ``optimizer_state`` says where the optimizer's state of large parameters is: ``"memory"``,
        ``"ssd"``, or on the SSD only if necessary (``"auto"``). ``spill_dtype="bfloat16"`` keeps intermediates in half
        the bytes; sums are still computed in the model's own dtype, and results again do not depend on the budgets.
        ``compute_dtype="bfloat16"`` rounds the factors of dense products, as autocast does.

        Modules in eval mode, of a model in training mode when it is given here, train in eval mode (a frozen
        ``BatchNorm``); otherwise everything trains as after ``model.train()``. Modes set later have no effect.

        ``loss`` is a torch loss or a callable on (outputs [r, C], labels) that returns one loss per row, [r], or a
        scalar that is their mean; for a model with several results it gets a tuple, and the first is scored. By default
        it is cross-entropy, for several labels per node BCE with logits, for values the mean squared error. ``metric``
        is what evaluation measures (see ``Metric``; default by the store's task). ``scheduler`` is one or several of
        torch's, stepped once an epoch; ``clip_norm`` bounds the norm of all gradients; ``average``, an
        ``AveragedModel(model)``, is updated from epoch ``average_from`` on and is then scored. ``embedding``, an
        ``Embedding`` or its number of columns, is trained with the model and is its input, after the features where the
        store has any. It ends with ``close`` unless ``out`` keeps it; ``predict("embeddings", layer=0)`` returns its
        rows. ``input_dropout`` drops from the input, before the first layer. ``threads`` compute tiles in parallel
        (default: torch's number). ``device`` is a name, torch's device, or a ``Device`` made by the caller. Weights and
        features of the store's edges are given to the model as ``edge_weight`` and ``edge_attr``. A model that takes
        none of them is refused, unless ``ignore_edge_data`` is ``"weight"``, ``"features"`` or ``"all"``. ``hardware``
        is the machine that the planner assumes (default: as ``ooc profile`` has measured it, if it has); it changes no
        result. The structure of the model and which of its parameters are trained are fixed here: later changes are
        refused, except to values of weights and buffers.

        Raises ModelError for what cannot be run exactly, BudgetError with the least budgets that would suffice.
        """
        _check_autocast()
        check_model(model, graph)
        as_given, model = model, getattr(model, "_orig_mod", model)  # torch.compile hides the arguments
        check_whole(seed, name="seed", least=0)
        check_whole(average_from, name="average_from")
        check_number(input_dropout, name="input_dropout")
        if optimizer is not None:
            check_optimizer(optimizer, model)
        self._lock = RLock()
        self.ranks = ranks = Ranks.of_environment()
        out = out if isinstance(out, RunFolder) else ranks.from_first(lambda: open_run_folder(out, seed))
        if ranks.rank and out is not None:
            out = out.followed()
        scratch = spill_folder(spill_dir, None if out is None else out.path, graph)
        resources = Resources.parse(
            gpu_budget,
            host_budget,
            memory=memory,
            spill_dir=scratch,
            block_rows=block_rows,
            slab_columns=slab_columns,
            exchange=exchange,
            exchange_by=exchange_by,
            link=link,
            max_ssd_writes=max_ssd_writes,
            spill_dtype=spill_dtype,
            tile_rows=_tuning.tile_rows,
            threads=threads,
            listener=listener,
            hardware=hardware,
            device=device,
        ).within_memory()
        self._relay = Relay(listener)
        resources = replace(resources, listener=self._relay)
        self._given: list[DataSnapshot | LossSnapshot] = []
        beside = () if embedding is not None else _further_inputs(model, graph, listener)
        if not isinstance(graph, Store | str | Path):
            self._given.append(DataSnapshot(graph, beside))
        if loss is not None:
            self._given.append(LossSnapshot(loss, is_own=takes_results(loss)))
        labels = _labels_of(graph)
        self._converted, graph = _open_graph(
            graph, scratch, resources, task_meant(loss, labels) if labels else None, beside
        )
        with _removed_on_error(self._converted):
            if out is not None:
                out.check_contents(graph)
            asked: dict[str, Any] = {
                "loss": loss,
                "seed": seed,
                "optimizer_state": optimizer_state,
                "flat_labels": all(y.dim() < 2 for y in labels) if labels else None,
                "input_dropout": input_dropout,
                "ignore_edge_data": ignore_edge_data,
                "compute_dtype": compute_dtype,
            }
            settings: dict[str, Any] = {"clip_norm": clip_norm, "average": average, "average_from": average_from}
            settings |= {"embedding": embedding, "spill_dtype": spill_dtype} | asked | self._extra_arguments()
            if ranks.count > 1:
                check_software(ranks)
                ranks.check_equal(graph.fingerprint(), f"the store {graph.path}")
                others = {"metric": metric, "scheduler": scheduler, "_tuning": _tuning}
                ranks.check_equal(described(model, optimizer, settings | others), "what is trained")
            self.model, self.store = model, graph
            self.metric = self._resolve_metric(metric, graph)
            if clip_norm is not None:
                check_number(clip_norm, name="clip norm")
                if not clip_norm > 0:
                    raise OptionError(f"clip norm must be positive, not {clip_norm}")
            self._clip_norm = clip_norm
            self._learnt: LearntRows | None = None
            if embedding is not None:
                embedding = embedding if isinstance(embedding, Embedding) else Embedding(embedding)
                folder = None if out is None else out.path / EMBEDDING
                given: dict[str, Any] = {"seed": seed, "folder": folder, "clip_norm": clip_norm, "ranks": ranks}
                self._learnt = LearntRows(embedding, graph, dtype_of(model), **given)
            self._size_lazy_parameters(ignore_edge_data)
            ranks.share(model)
            # A model without parameters gets an empty optimizer, whose learning rate an embedding uses.
            self.optimizer = optimizer or torch.optim.Adam(
                [*model.parameters()] or [nn.Parameter(torch.empty(0))], lr=0.01
            )
            self._schedules = Schedules(scheduler, self.optimizer, rising=self.metric.higher_is_better)
            self._averaging = Averaging(as_given, average, average_from)
            stepped = self.optimizer  # so that the closure does not refer to the trainer
            self._asked = asked | {
                "metric": None if metric is None else self.metric,
                "averaging": self._averaging,
                "savings": _tuning.savings,
                "optimizer": lambda: stepped,
                "optimizer_options": self.optimizer.param_groups,
                "state_folder": None if out is None else out.path / OPTIMIZER,
                "learnt": self._learnt,
            }
            self._snapshot = ModelSnapshot(model)
            self._ready(resources, [model] if average is None else [model, average])
            if self._is_traced:
                self._snapshot.check(tried=True)
            if not self._is_traced:
                self._snapshot = ModelSnapshot(model, around=False)
            self._run = out
            if out is not None:  # shown by ooc runs
                out.config |= {"scored_by": self.metric.value, "model_class": type(model).__name__, "graph": graph.name}
                kept_otherwise = ("seed", "optimizer_state", "threads")
                settings = {name: one for name, one in settings.items() if name not in kept_otherwise}
            made_of = {} if out is None else described(model, None, settings | {"embedding": embedding})
            on_disk = self._kept is not None and self._planned.has_state_on_disk
            parts = self.optimizer, self._schedules, self._averaging, self.metric, out, seed, self._learnt
            self._state = TrainingState(model, *parts, self._kept, on_disk, ranks, made_of, listener)
            held = getattr(self, "_session", None), self._learnt, self._kept, self._run
            dropped = weakref.finalize(self, _close_dropped, type(model).__name__, *held)
            dropped.atexit = False  # at exit the system frees everything

    def _ready(self, resources: Resources, models: list[nn.Module]) -> None:
        """Plan, and prepare the session; ``models``: all whose weights it reads."""
        job = self._job(resources)
        self._planned, self._objective, self._scorer = job, job.objective, job.objective.scorer
        by_itself: dict[str, Any] = {"ranks": ALONE, "threads": job.resources.own_threads, "threads_by_rank": ()}
        self._resources = replace(job.resources, **by_itself)  # each process predicts by itself
        self._prepared = job.ready()
        self._stepped = self._prepared.network.parameters
        self._kept = job.state
        self.hardware, self.limits = job.resources.hardware, job.resources.limits
        self.workload, self.plan = self._prepared.workload, self._prepared.plan
        self.spill_dir = self._prepared.spill_dir
        if self._resources.device is not None:
            self._objective.count_split_rows(self.store)
        self._session = Session(self._prepared, models, self.optimizer)

    def _size_lazy_parameters(self, ignore_edge_data: str) -> None:
        """Initialise lazy parameters before an optimizer asks for them."""
        given: dict[str, Any] = {"ignore_edge_data": ignore_edge_data, "learnt": self._learnt}
        size_lazy_parameters(self.model, setting_of(self.store, dtype_of(self.model), **given))

    def _extra_arguments(self) -> dict[str, Any]:
        """Return the further arguments of this kind of training, by name."""
        return {}

    def _resolve_metric(self, name: str | None, graph: Store) -> Metric:
        return resolve_metric(name, graph.task, graph.num_classes)

    def _job(self, resources: Resources) -> Job:
        """Return the job to plan; a subclass that takes memory for other purposes gives it less."""
        return prepare(self.model, self.store, resources.shared_with(self.ranks), **self._asked)

    @interruptible_by_ctrl_c()
    def close(self) -> None:
        """Free arenas, threads and spill files. The model keeps its weights; ``fit`` may be called again."""
        with self._at_work():
            self._free_memory()
            for files in (self._learnt, self._kept, self._run):
                if files is not None:
                    files.close()
            if self._converted is not None:
                self._converted.cleanup()

    def _free_memory(self) -> None:
        """Free what the next epoch makes anew."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _parts_of(graph: Any) -> Iterator[Any]:
    """Yield the parts of PyG's data, or of lists and datasets of them, that have features and labels."""
    if isinstance(graph, (list, tuple, torch.utils.data.Dataset)):
        from ooc.sources.formats.many_graphs import in_turn

        for one in in_turn(graph):
            yield from _parts_of(one)
    else:
        yield from getattr(graph, "stores", [graph])


def _further_inputs(model: nn.Module, graph: Any, listener: Listener) -> tuple[str, ...]:
    """Return the numeric node attributes of PyG's data, beside ``x``, that the model's ``forward`` asks for.

    The user is told which of them are optional, since they may not be meant to be used.
    """
    parts = _parts_of(graph)  # a part refers to its whole
    part: Any = next(parts, None)
    if not hasattr(part, "is_node_attr") or hasattr(graph, "node_types"):
        return ()
    from ooc.model.layers.decoders import LinkPredictor
    from ooc.model.lowering.tracing import asked_for  # both import PyG

    asking = model.encoder if isinstance(model, LinkPredictor) else model
    asked, found, takes = asked_for(asking, part.keys()), [], signature(asking.forward).parameters
    for name in sorted(asked.difference(("x", "y", "batch", "ptr"))):
        value: Any = part.get(name)
        of_numbers = isinstance(value, Tensor) and value.layout is torch.strided and value.dtype is not torch.bool
        is_row = of_numbers and value.dim() in (1, 2) and not name.endswith(("_mask", "_idx"))
        if is_row and part.is_node_attr(name):  # PyG before 2.7 may fail on adj_t
            found.append(name)
    if optional := [name for name in found if name in takes and takes[name].default is not Parameter.empty]:
        names = " and ".join(optional)
        caution(
            listener, f"forward is given {names} of the data, which it may do without; delete data.{optional[0]} else"
        )
    return tuple(found)


def _labels_of(graph: Any) -> list[Tensor]:
    """Return the labels of PyG's data; none for a store or its path."""
    return [part.y for part in _parts_of(graph) if isinstance(getattr(part, "y", None), Tensor)]


def _check_autocast() -> None:
    """Raise OptionError where torch's autocast is on, which would hold on this thread only."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise OptionError("torch.autocast is on; train and predict outside of it, with compute_dtype='bfloat16'")


def _open_graph(
    graph: Any, folder: Path, resources: Resources, task: Task | None, beside: Sequence[str]
) -> tuple["TemporaryDirectory[str] | None", Store]:
    """Return the store of ``graph``, open or a path; or a temporary one of PyG's data, with the folder it is in.

    The temporary store has labels of the ``task`` and the attributes ``beside`` x.
    """
    if isinstance(graph, Store):
        return None, graph
    if isinstance(graph, str | Path):
        return None, open_store(graph)
    from ooc.conversion.conversion import convert

    names = "x", "y", "edge_weight", "edge_attr", *beside
    reading: dict[str, Any] = {} if task is None else {"task": task.value}
    found = (getattr(part, name, None) for part in _parts_of(graph) for name in names)
    kinds = {one.dtype for one in found if isinstance(one, Tensor) and one.is_floating_point()}
    dtype = str(max(kinds, key=lambda kind: kind.itemsize, default="torch.float32")).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryDirectory(prefix="ooc-graph-", dir=folder)
    except OSError as error:
        raise OptionError(f"spill_dir {folder}: {error.strerror}") from error
    try:
        store = convert(
            graph,
            Path(temporary.name) / _CONVERTED_NAME,
            dtype=dtype if dtype in ("float16", "float32", "float64") else "float32",
            host_budget=resources.limits.memory_bytes,
            listener=resources.listener,
            inputs=beside,
            **reading,
        )
    except BaseException as error:
        temporary.cleanup()
        if isinstance(error, BudgetError):  # the message is worded for a conversion
            raise BudgetError(str(error).replace("host budget", "memory").replace("host_budget", "memory")) from error
        raise
    return temporary, store


@contextmanager
def _removed_on_error(converted: "TemporaryDirectory[str] | None") -> Iterator[None]:
    """Within this context, an error removes ``converted`` at once, and does not mention its path.

    A notebook keeps the error, and with it the trainer.
    """
    try:
        yield
    except BaseException as error:
        if converted is not None:
            converted.cleanup()
            if isinstance(error, OocError):
                error.args = (
                    str(error).replace(str(Path(converted.name, _CONVERTED_NAME)), "the graph"),
                    *error.args[1:],
                )
        raise


def open_run_folder(out: str | Path | RunFolder | None, seed: int) -> RunFolder | None:
    """Return the run's folder: an existing run's, to be resumed, or a new one."""
    if out is None or isinstance(out, RunFolder):
        return out
    if not isinstance(out, str | Path):
        raise OptionError(f"out {out!r:.40} is no path of a folder")
    return RunFolder.open(out, given={"seed": seed}) if holds_run(Path(out)) else RunFolder.create(out, {"seed": seed})


def _close_dropped(
    model: str, session: Session | None, learnt: LearntRows | None, kept: StateOnDisk | None, run: RunFolder | None
) -> None:
    """Close what a trainer holds that was dropped without ``close``."""
    if session is not None and session.started:
        warnings.warn(f"a trainer of {model} was dropped without close()", ResourceWarning, stacklevel=2)
        session.close()
    for files in (learnt, kept, run):
        if files is not None:
            files.close()
