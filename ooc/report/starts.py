# SPDX-License-Identifier: Apache-2.0
"""What a run's folder is told when training starts: what is promised of an epoch, and by which command it runs where.

Reports (``ooc report``) are made from it afterwards, on any machine.
"""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ooc.memory import filesystem_of, processor_name
from ooc.plan import Hardware
from ooc.plan.simulate.condensed import condense
from ooc.progress.plan_report import PlanReport
from ooc.report.machine import versions_of
from ooc.train.metrics import Metric
from ooc.train.runs.run import FORECAST, PLANNED, RunFolder

_PACKAGES = ("ooc", "torch", "torch-geometric", "numpy", "zarr")


def note_start(run: RunFolder, report: PlanReport | None, spill_dir: Path, metric: Metric) -> None:
    """Put the forecast, the planned epoch, the command, the machine and the versions into the folder of ``run``, for
    the epochs from here on. Without a ``report`` nothing is forecast."""
    last = run.last()
    first_epoch = 1 if last is None else last["epoch"] + 1
    if report is not None:
        run.write(FORECAST, {"first_epoch": first_epoch, **report.as_dict()})
        run.write(PLANNED, condense(report.timeline))
    run.add_start(
        {
            "first_epoch": first_epoch,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["ooc", *sys.argv[1:]]),
            "metric": {"name": metric.value, "higher_is_better": metric.higher_is_better},
            "machine": _machine(spill_dir, None if report is None else report.hardware),
            "versions": {name: version for name, version in versions_of(_PACKAGES).items() if version is not None},
        }
    )


def _machine(spill_dir: Path, hardware: Hardware | None) -> dict[str, Any]:
    folder = next(path for path in (spill_dir, *spill_dir.absolute().parents) if path.exists())
    gpu = {}
    if hardware is not None and hardware.has_device_memory:
        import torch

        gpu["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else hardware.name
    return gpu | {
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "scratch": f"{folder} ({filesystem_of(folder)})",
        "system": f"{platform.system()} {platform.release()}",
    }
