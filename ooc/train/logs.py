# SPDX-License-Identifier: Apache-2.0
"""Epochs as others read them: a CSV table, TensorBoard. Listeners of events, for ``Trainer(listener=…)``."""

import csv
import importlib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ooc.errors import OptionError
from ooc.events import EpochFinished, Event, Listener
from ooc.train.record import EpochRecord


def several(*listeners: Listener) -> Listener:
    """A listener that passes every event on to all of ``listeners``."""

    def listen(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return listen


class CsvLog:
    """One line an epoch in the file ``path``, whose columns are an `EpochRecord`'s fields but its passes; empty where
    not evaluated.

    A file that is there already is gone on with: its lines from the first epoch heard of are dropped, which is
    what a resumed run computes again.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._names = [field.name for field in fields(EpochRecord) if field.name != "passes"]
        self._begun = False

    def __call__(self, event: Event) -> None:
        if not isinstance(event, EpochFinished):
            return
        record: EpochRecord = event.record
        if not self._begun:
            self._begin(record.epoch)
            self._begun = True
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._names, extrasaction="ignore").writerow(record.as_dict())

    def _begin(self, epoch: int) -> None:
        """Keep the lines before ``epoch``; a torn or foreign one ends them."""
        kept: list[Mapping[str, str]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
                for row in csv.DictReader(file):
                    if row.get("epoch") != str(len(kept) + 1) or len(kept) + 1 == epoch or None in row.values():
                        break
                    kept.append(row)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


class TensorBoardLog:
    """Loss, scores, times and bytes of every epoch as scalars for TensorBoard, in ``folder``.

    What a resumed run computes again is purged. OptionError where TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self._writers: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise OptionError("logging to TensorBoard needs it; pip install tensorboard") from None
        self._folder = Path(folder)
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if not isinstance(event, EpochFinished):
            return
        record: EpochRecord = event.record
        if self._writer is None:
            self._writer = self._writers.SummaryWriter(str(self._folder), purge_step=record.epoch)
        for name, value in record.as_dict().items():
            if name not in ("epoch", "passes") and value is not None:
                self._writer.add_scalar(_tag(name), value, record.epoch)
        self._writer.flush()


def _tag(name: str) -> str:
    """Related scalars in one group."""
    for suffix, group in (("_acc", "score"), ("_bytes", "bytes"), ("_s", "seconds")):
        if name.endswith(suffix):
            return f"{group}/{name.removesuffix(suffix)}"
    return name
