# SPDX-License-Identifier: Apache-2.0
"""The record of one training epoch: a line of ``metrics.jsonl``."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from operator import sub
from typing import Any, NamedTuple


class Taken(NamedTuple):
    """The resources a training has taken so far, or since an earlier moment.

    They are wall-clock time, all threads' time on tiles, the process's CPU time, and waiting for the SSD; the rest as
    in an `EpochRecord`.
    """

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
        """Return what was taken since ``earlier``."""
        taken: Any = map(sub, self, earlier)
        return Taken(*taken)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass of an epoch's program, in the plan's order. ``name`` is its title there.

    ``time_s`` is wall-clock time, ``compute_s`` the time all threads together spent on its tiles, and ``cpu_s`` the CPU
    time of the whole process, including moving blocks. ``wait_s`` is how long the thread that moves blocks waited for
    the SSD. Bytes belong to requests that ended during the pass, including reads ahead for the next pass and writes of
    the one before.
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
    """Return ``values`` of a run's file under today's names of scores, which used to be ``…_acc`` for every metric."""
    return {_RENAMED.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch. ``…_score`` are by the run's metric, None where not evaluated; times are in seconds, the rest in
    bytes.

    ``time_s`` is training alone, ``eval_s`` the evaluation after it; where an epoch is scored by the next one's forward
    pass, ``eval_s`` is 0 and the next ``time_s`` includes it. ``io_wait_s`` is the part of both spent waiting for the
    disk, ``io_busy_s`` the part of training in which the disk was busy. ``hit_rate`` is the share of reads of blocks
    that found them in memory. Peaks are those of the epoch, of the memory under each budget. ``passes`` are those of
    the training program, in order. ``to_device_bytes`` and ``to_host_bytes`` were copied to and from a device with its
    own memory. ``ssd_way`` is the engine that read and wrote the SSD, and the way from there to such a device.
    ``received_bytes`` are of rows sent by other processes of the training. ``exchange_wait_s`` is the time spent
    waiting for them and for sums, including processes that compute longer. Of several processes, times and bytes are
    the first one's.
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

    def scored(self, scores: Mapping[str, float | None], *, eval_s: float = 0.0, wait_s: float = 0.0) -> "EpochRecord":
        """Return this record with the ``scores`` ``train_score``, …, and what a separate evaluation took, if there was
        one."""
        return replace(self, **scores, eval_s=eval_s, io_wait_s=self.io_wait_s + wait_s)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """Return field names and values, in order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochRecord":
        """Return the inverse of `as_dict`; fields with a default may be missing, as in earlier versions' records.

        Raises ValueError when another field is missing, unknown, or of another type.
        """
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
        """Return one JSON object in one line. A loss that is not finite becomes null, as JSON has no such number."""
        values = self.as_dict()
        if not math.isfinite(self.loss):
            values["loss"] = None
        return json.dumps(values, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "EpochRecord":
        """Return the inverse of `to_line`, null being read as NaN; raise ValueError for a torn line."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        if values.get("loss", 0.0) is None:
            values["loss"] = math.nan
        return cls.from_dict(values)
