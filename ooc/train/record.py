# SPDX-License-Identifier: Apache-2.0
"""What one epoch of training came to: a line of ``metrics.jsonl``."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch. Accuracies are fractions, None where not evaluated; times are seconds, the rest bytes.

    ``time_s`` is training alone, ``eval_s`` the evaluation after it. ``io_wait_s`` is the part of
    both spent waiting for the disk. Peaks are those of the epoch, of the memory under each budget.
    """

    epoch: int
    loss: float
    train_acc: float | None
    valid_acc: float | None
    test_acc: float | None
    time_s: float
    eval_s: float
    ssd_read_bytes: int
    ssd_write_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    io_wait_s: float

    def as_dict(self) -> dict[str, Any]:
        """Field names to values, in order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochRecord":
        """The inverse of `as_dict`. Raises ValueError when a field is missing or unknown."""
        names = [field.name for field in fields(cls)]
        if set(values) != set(names):
            raise ValueError(f"fields {sorted(values)} are not those of an epoch's record")
        return cls(**values)

    def to_line(self) -> str:
        """One JSON object in one line. A loss that is no finite number, which JSON lacks, becomes null."""
        values = self.as_dict()
        if not math.isfinite(self.loss):
            values["loss"] = None
        return json.dumps(values, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "EpochRecord":
        """The inverse of `to_line`, null being read as NaN. Raises ValueError for a torn line."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        if values.get("loss", 0.0) is None:
            values["loss"] = math.nan
        return cls.from_dict(values)
