# SPDX-License-Identifier: Apache-2.0
"""What one epoch of training came to: a line of ``metrics.jsonl``."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from operator import sub
from typing import Any, NamedTuple


class Taken(NamedTuple):
    """What a training has taken so far, or since an earlier moment: of the clock, of all threads on tiles and of the
    process, of waiting for the SSD; the rest as in an `EpochRecord`."""

    time_s: float
    compute_s: float
    cpu_s: float
    io_wait_s: float
    ssd_read_bytes: int
    ssd_write_bytes: int
    io_busy_s: float
    to_device_bytes: int
    to_host_bytes: int
    received_bytes: int
    exchange_wait_s: float

    def since(self, earlier: "Taken") -> "Taken":
        """What was taken from ``earlier`` on."""
        taken: Any = map(sub, self, earlier)
        return Taken(*taken)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass of an epoch's program, in the plan's order. ``name`` is its title there.

    ``time_s`` is the clock's, ``compute_s`` what all threads together have spent on its tiles, ``cpu_s`` the processor
    time of the whole process, moving blocks included, ``wait_s`` how long the thread that moves blocks waited for the
    SSD. Bytes are those whose requests ended during the pass: reads ahead for the next pass and writes left by the one
    before are among them.
    """

    program: str
    name: str
    time_s: float
    compute_s: float
    cpu_s: float
    wait_s: float
    read_bytes: int
    write_bytes: int


_RENAMED = {f"{split}_acc": f"{split}_score" for split in ("train", "valid", "test")}


def with_names_of_now(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a run's file by today's names of scores, which were ``…_acc`` once whatever the metric."""
    return {_RENAMED.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch. ``…_score`` are by the run's metric, None where not evaluated; times are seconds, the rest bytes.

    ``time_s`` is training alone, ``eval_s`` the evaluation after it; where an epoch is scored by the next one's
    forward pass, ``eval_s`` is 0 and the next ``time_s`` has it. ``io_wait_s`` is the part of
    both spent waiting for the disk, ``io_busy_s`` the part of training in which the disk had something to do, and
    ``hit_rate`` the part of all reads of blocks that found them in memory. Peaks are those of the epoch, of the
    memory under each budget. ``passes`` are those of the training program, one after the other. ``to_device_bytes`` and
    ``to_host_bytes`` went over the wire to a device with memory of its own, and came back. ``ssd_way`` is the engine
    that read and wrote the SSD, and how that got to such a device. ``received_bytes`` are of rows that other processes
    of the training have sent, and ``exchange_wait_s`` what was waited for them and for sums, who computes longer
    included; of several processes the first one's times and bytes are told.
    """

    epoch: int
    loss: float
    train_score: float | None = None
    valid_score: float | None = None
    test_score: float | None = None
    time_s: float
    eval_s: float = 0.0
    ssd_read_bytes: int
    ssd_write_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    io_wait_s: float
    io_busy_s: float = 0.0
    hit_rate: float = 1.0
    passes: tuple[PassRecord, ...] = field(default=(), repr=False)
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    ssd_way: str = ""
    received_bytes: int = 0
    exchange_wait_s: float = 0.0

    @property
    def bound(self) -> str:
        """What the epoch waited for: ``"ssd"`` if computing waited longer for the SSD than that for computing."""
        return "ssd" if self.io_wait_s > max(0.0, self.time_s - self.io_busy_s) else "compute"

    def scored(self, scores: Mapping[str, float | None], *, eval_s: float = 0.0, wait_s: float = 0.0) -> "EpochRecord":
        """This record with the ``scores`` ``train_score``, …, and what an evaluation of its own took, if it had one."""
        return replace(self, **scores, eval_s=eval_s, io_wait_s=self.io_wait_s + wait_s)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """Field names to values, in order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochRecord":
        """The inverse of `as_dict`; fields with a default may be missing, as from earlier versions' records. Raises
        ValueError when another one is, or is unknown, or of another kind."""
        values = with_names_of_now(values)
        names = {field.name for field in fields(cls)}
        if not {field.name for field in fields(cls) if field.default is MISSING} <= set(values) <= names:
            raise ValueError(f"fields {sorted(values)} are not those of an epoch's record")
        for name in names & set(values) - {"passes", "ssd_way"}:
            value = values[name]
            number = isinstance(value, int) if name == "epoch" else isinstance(value, int | float)
            if not number and not (value is None and name.endswith("_score")):
                raise ValueError(f"{name} of an epoch's record is {value!r}")
        try:
            passes = tuple(PassRecord(**values_of_pass) for values_of_pass in values.get("passes", ()))
        except TypeError as error:
            raise ValueError(f"the passes are not those of an epoch's record: {error}") from None
        return cls(**{**values, "passes": passes})

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
