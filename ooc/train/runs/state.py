# SPDX-License-Identifier: Apache-2.0
"""The state of a training: the epochs done, the best one, and all that resuming exactly needs.

Weights alone are read here from a run's folder and written as files that plain PyG loads.
"""

import io
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ooc.engine.record import EpochRecord, with_names_of_now
from ooc.errors import OptionError, RunError, TrainingError, as_error
from ooc.events import Listener, caution, ignore
from ooc.ranks import ALONE, Ranks
from ooc.storage.array import replace_file
from ooc.storage.store import Store
from ooc.train.embedding import Embedding, LearntRows
from ooc.train.metrics import Metric
from ooc.train.optimizer_state import PIECE, StateOnDisk
from ooc.train.rows_file import check_new
from ooc.train.runs.run import RunFolder
from ooc.train.schedule import Averaging, Schedules


@dataclass(eq=False)
class TrainingState:
    """The state of a training after ``epoch`` epochs; with a run folder, each finished epoch's state is saved there.

    ``best`` has the epoch and the scores of the best validation score. ``stale`` counts the scheduled evaluations since
    the best of those.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedules: Schedules
    averaging: Averaging
    metric: Metric
    run: RunFolder | None
    seed: int
    learnt: LearntRows | None = None
    kept: StateOnDisk | None = None
    """Optimizer state that may be on the SSD; ``on_disk`` says whether it is there."""
    on_disk: bool = False
    ranks: Ranks = ALONE
    """The processes that train together; the first writes the run."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """Descriptions or checksums, by name, of what is trained; ``listener`` is told where the run had others."""
    listener: Listener = ignore
    epoch: int = field(default=0, init=False)
    best: dict[str, Any] | None = field(default=None, init=False)
    stale: int = field(default=0, init=False)
    best_in_turn: float | None = field(default=None, init=False)
    _saved: int = field(default=0, init=False)

    def conclude(self, record: EpochRecord, *, in_turn: bool) -> None:
        """Finish an epoch: note a new best score, write the checkpoint and the metrics.

        ``record`` is complete, and the model is as the epoch left it. ``in_turn``: the evaluation would have happened
        without a stop at this epoch, too. Only then do schedules and patience see the score, so that a training that
        stops and resumes takes the steps of one that did not stop.
        """
        if (score := record.valid_score) is not None:
            if in_turn:
                self.schedules.step_scored(score)
                self.stale = 0 if self._is_better(score, self.best_in_turn) else self.stale + 1
                self.best_in_turn = self.best_in_turn if self.stale else score
            if self._is_better(score, None if self.best is None else self.best["valid_score"]):
                self._note_best(record)
        if self.run is not None:
            self.run.save(self._state(record))
            if self.learnt is not None:
                self.learnt.saved()
            if self.kept is not None:
                self.kept.saved()
            self.run.append(record)
            self._saved = record.epoch

    def check_loss(self, loss: float) -> None:
        """Raise TrainingError where the current epoch's loss is not finite."""
        if not math.isfinite(loss):
            raise self._divergence_error(f"the loss of epoch {self.epoch + 1} is {loss}")

    def check_weights(self, moved: Collection[nn.Parameter] | None = None) -> None:
        """Raise TrainingError where the current epoch's step has made weights infinite or NaN.

        ``moved``: the parameters that have a gradient (None: all are checked). Other parameters may hold anything, as
        RGATConv leaves some uninitialised. A device is asked once for all parameters together.
        """
        trained = [p for p in (self.model.parameters() if moved is None else moved) if p.requires_grad]
        flat = [p.detach().reshape(-1) for p in trained]
        parts = (one[start : start + PIECE] for one in flat for start in range(0, len(one), PIECE))
        finite = [torch.isfinite(part).all() for part in parts]  # isfinite allocates copies
        if finite and not bool(torch.stack(finite).all()):
            broken = next(p for p in trained if not bool(torch.isfinite(p).all()))
            name = next(name for name, p in self.model.named_parameters() if p is broken)
            raise self._divergence_error(f"the step of epoch {self.epoch + 1} made {name} infinite or no number")
        if self.learnt is not None and self.learnt.stepping.diverged:
            raise self._divergence_error(f"the step of epoch {self.epoch + 1} made the embedding infinite or no number")

    def _divergence_error(self, what: str) -> TrainingError:
        kept = ""
        if self.run is not None:
            last = f"the checkpoint of epoch {self._saved} is kept" if self._saved else "there is no checkpoint"
            kept = f"; {last}"
        return TrainingError(f"{what}{kept}; a lower learning rate or clipped gradients may help")

    def _is_better(self, score: float, before: float | None) -> bool:
        return before is None or (score > before if self.metric.higher_is_better else score < before)

    def _note_best(self, record: EpochRecord) -> None:
        self.best = {"epoch": record.epoch, "valid_score": record.valid_score, "test_score": record.test_score}
        if self.run is not None:
            with self.averaging.in_place():
                best = {**self.best, "model": self.model.state_dict(), "record": record.as_dict()}
                self.run.save_best({**best, **self._embedding()})
            if self.learnt is not None:
                self.learnt.kept_as_best()

    def _embedding(self) -> dict[str, Any]:
        """Return the embedding's part of a saved state."""
        return {} if self.learnt is None else {"embedding": self.learnt.state()}

    def _state(self, record: EpochRecord) -> dict[str, Any]:
        return {
            "epoch": record.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_state": None if self.kept is None else self.kept.state(),
            "schedules": self.schedules.state(),
            "average": self.averaging.state(),
            "record": record.as_dict(),
            "best": self.best,
            "stale_epochs": self.stale,
            "best_in_turn": self.best_in_turn,
            "seed": self.seed,
            "kinds": self._kinds,
            "made_of": dict(self.made_of),
            **self._embedding(),
        }

    def resume(self) -> None:
        """Load the run's last checkpoint; raise RunError where there is no run.

        For a run that was stopped before its first checkpoint, only the options are there to resume from.
        """
        on_one = self.ranks.local_count == self.ranks.count  # then each process reads the file, without a copy
        state, of_best = self._loaded() if on_one else self.ranks.from_first(self._loaded)
        if state is None:
            return
        if self.learnt is not None:
            self.learnt.load(state.get("embedding"), of_best)
        try:
            self.model.load_state_dict(state["model"])
            _load_optimizer(self.optimizer, state["optimizer"])
            if self.kept is not None:
                self.kept.load(state.get("optimizer_state"), into_memory=not self.on_disk)
            self.averaging.load(state.get("average"))
            self.schedules.load(state.get("schedules", []))
            epoch, best, stale = state["epoch"], state["best"], state["stale_epochs"]
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise RunError(f"the checkpoint of {self._path} does not fit this training: {error}") from error
        self.epoch, self.best, self.stale = epoch, best and with_names_of_now(best), stale
        self.best_in_turn = state.get("best_in_turn", (self.best or {}).get("valid_score"))
        self._saved = epoch

    def _loaded(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the checkpoint, and what the best epoch's state has about an embedding."""
        if self.run is None:
            raise RunError("there is no run to go on with; give the trainer the run's folder (out)")
        if not (self.run.resumed or self.run.has_checkpoint):
            raise RunError(f"there is no run at {self._path} to go on with")
        state = self.run.load(self._check)
        return state, None if self.learnt is None else (self.run.load_best() or {}).get("embedding")

    def _check(self, state: dict[str, Any]) -> None:
        """Raise RunError, before anything is changed, if the checkpoint belongs to another model or other options."""
        saved = state.get("model")
        if not isinstance(saved, dict) or not {"optimizer", "record", "best", "stale_epochs"} <= state.keys():
            raise RunError(f"{self._path} holds no checkpoint that a training can go on from")
        own = self.model.state_dict()
        for name in [*own, *saved]:
            if _shape(own.get(name)) != _shape(saved.get(name)):
                there, here = (_shape(found.get(name)) or "missing" for found in (saved, own))
                of = f"{name} is {there} there, {here} in this model"
                raise RunError(f"the checkpoint of {self._path} is of another model: {of}")
        if (there := state.get("kinds", self._kinds)) != self._kinds:
            of = f"{', '.join(there)} there, {', '.join(self._kinds)} in this training"
            raise RunError(f"the checkpoint of {self._path} is of another optimizer, schedule or metric: {of}")
        if state.get("optimizer_state") is not None and self.kept is None:
            raise RunError("the run was begun with what the optimizer keeps on the SSD, where it cannot be now")
        if (state.get("embedding") is None) != (self.learnt is None):
            raise RunError("the run was begun with an embedding or this trainer has one, not both")
        if (state.get("average") is None) == self.averaging.active:
            raise RunError("the run was begun with weight averaging or this trainer has it, not both")
        before = state.get("made_of", {})
        if others := [name for name, said in self.made_of.items() if before.get(name, said) != said]:
            named = f"{', '.join(others[:5])}{', …' if others[5:] else ''}"
            caution(self.listener, f"{self._path} was trained with another {named}; it goes on with what is given now")

    @property
    def _kinds(self) -> list[str]:
        """The names of the optimizer, the schedules and the metric."""
        made = [type(one).__name__ for one in (self.optimizer, *self.schedules.all)]
        return [*made, self.metric.value]

    @property
    def _path(self) -> Path | None:
        return None if self.run is None else self.run.path


def _shape(value: object) -> str:
    """Return a tensor's shape for messages; an empty string where there is no tensor."""
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else ""


# ---- weights on their own -------------------------------------------------------------------------------------------


State = dict[str, Tensor]


def load_weights(run: RunFolder, which: str) -> State:
    """Return the ``state_dict`` of the run's model; raise RunError where the run has none yet.

    ``which``: ``"best"`` for the best validation score, or the last weights where nothing was evaluated; ``"last"`` for
    those after the last epoch. Where weights are averaged, their average is returned.
    """
    state, is_best = _saved_state(run, which)
    if not is_best:
        average = state.get("average")
        if average is not None and int(average["n_averaged"]):
            return {name.removeprefix("module."): t for name, t in average.items() if name.startswith("module.")}
    found = state.get("model")
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"the checkpoint of {run.path} holds no weights")
    return found


def learnt_rows(run: RunFolder, which: str, embedding: Embedding, store: Store) -> LearntRows:
    """Return the embedding that belongs to these weights; raise RunError where it is missing."""
    state, _ = _saved_state(run, which)
    dtype = next((weight.dtype for weight in load_weights(run, which).values()), torch.get_default_dtype())
    return LearntRows.of_run(embedding, store, dtype, run.path, state.get("embedding"))


def _saved_state(run: RunFolder, which: str) -> tuple[dict[str, Any], bool]:
    """Return the saved state of the best or the last epoch, and whether it is that of the best one."""
    best = run.load_best() if which == "best" else None
    state = run.last() if best is None else best
    if state is None:
        raise RunError(f"the run at {run.path} has no weights yet: no epoch was finished")
    return state, best is not None


def export_weights(state: State, path: Path, *, metadata: dict[str, str], force: bool) -> None:
    """Write ``state`` to ``path``, as safetensors or for ``torch.load`` depending on the suffix: completely or not at
    all.

    Raises OptionError for another suffix, or where the file exists and ``force`` is not given.
    """
    match path.suffix:
        case ".safetensors":
            copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
            data = safetensors.torch.save(copies, metadata)  # safetensors refuses tensors that share memory
        case ".pt":
            buffer = io.BytesIO()
            torch.save(state, buffer)
            data = buffer.getvalue()
        case _:
            raise OptionError(f"{path} must end in .safetensors or .pt")
    check_new(path, force=force)
    with as_error(OptionError, path):
        replace_file(path, data)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state with the dtypes it was saved in.

    torch converts state to its parameter's dtype. Where state was float32 for a float64 parameter, as NAdam's product
    is, training would continue with other bits.
    """
    optimizer.load_state_dict(saved)
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    for parameter, number in chain(*(zip(one["params"], other["params"], strict=True) for one, other in groups)):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                kept = optimizer.state[parameter]
                kept[name] = kept[name].to(value.dtype)
