# SPDX-License-Identifier: Apache-2.0
"""How far a training has come: epochs done, the best of them, and all that going on exactly from here needs."""

from typing import Any

import torch
from torch import nn

from ooc.errors import RunError
from ooc.train.averaging import Averaging
from ooc.train.metrics import Metric
from ooc.train.record import EpochRecord
from ooc.train.run import RunFolder
from ooc.train.schedule import Schedules


class Standing:
    """``epoch`` epochs are done; ``best`` has the best validation score's epoch and scores; ``stale`` counts the
    evaluations since. With a run folder, every epoch that is concluded is kept there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedules: Schedules,
        averaging: Averaging,
        metric: Metric,
        run: RunFolder | None,
        seed: int,
    ) -> None:
        self.epoch = 0
        self.best: dict[str, Any] | None = None
        self.stale = 0
        self._model = model
        self._optimizer = optimizer
        self._schedules = schedules
        self._averaging = averaging
        self._metric = metric
        self._run = run
        self._seed = seed

    def conclude(self, record: EpochRecord) -> None:
        """``record`` is complete, the model as it was after its epoch: note the best, write checkpoint and metrics."""
        if record.valid_acc is not None:
            self._schedules.step_scored(record.valid_acc)
            self._compare(record, record.valid_acc)
        if self._run is not None:
            self._run.save(self._state(record))
            self._run.append(record)

    def _compare(self, record: EpochRecord, score: float) -> None:
        if self.best is not None and not self._better(score, self.best["valid_acc"]):
            self.stale += 1
            return
        self.best = {"epoch": record.epoch, "valid_acc": score, "test_acc": record.test_acc}
        self.stale = 0
        if self._run is not None:
            with self._averaging.in_place():
                self._run.save_best({**self.best, "model": self._model.state_dict(), "record": record.as_dict()})

    def _better(self, score: float, best: float) -> bool:
        return score > best if self._metric.higher_is_better else score < best

    def _state(self, record: EpochRecord) -> dict[str, Any]:
        return {
            "epoch": record.epoch,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedules": self._schedules.state(),
            "average": self._averaging.state(),
            "record": record.as_dict(),
            "best": self.best,
            "stale_epochs": self.stale,
            "seed": self._seed,
        }

    def resume(self) -> None:
        """Take up the run's last checkpoint, if it has one."""
        state = self._run.load() if self._run is not None else None
        if state is None:
            return
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        average = state.get("average")
        if (average is None) == self._averaging.active:
            raise RunError("the run was begun with weight averaging or this trainer has it, not both")
        self._averaging.load(average)
        self._schedules.load(state.get("schedules", []))
        self.epoch = state["epoch"]
        self.best = state["best"]
        self.stale = state["stale_epochs"]
